/** Every word that a user reads goes through here, so that JupyterLab's language packs reach it. */

export interface Translator {
  /** `text` with `%1`, `%2`… replaced by the arguments. */
  one(text: string, ...args: unknown[]): string;
  /** `single` or `many`, by `count`; `%1` is the count. */
  many(single: string, many: string, count: number, ...args: unknown[]): string;
  /** Its language (BCP 47), in whose form dates are written. */
  readonly language: string;
}

function fill(text: string, args: unknown[]): string {
  return text.replace(/%(\d+)/g, (mark, place: string) => {
    const index = Number(place) - 1;
    return index in args ? String(args[index]) : mark;
  });
}

const english: Translator = {
  one: (text, ...args) => fill(text, args),
  many: (single, many, count, ...args) => fill(count === 1 ? single : many, [count, ...args]),
  language: 'en'
};

export let trans: Translator['one'] = english.one;

export let plural: Translator['many'] = english.many;

export let language: Translator['language'] = english.language;

/** From now on words come from `translator`; null: English. What is on the screen already stays as it is. */
export function translateWith(translator: Translator | null): void {
  ({ one: trans, many: plural, language } = translator ?? english);
}
