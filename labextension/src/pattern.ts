/** What is searched for in single lines: a text, or a regular expression. No line takes longer than its length says. */
import { Automaton, Program } from './automaton';
import { Irregular, parse } from './expression';

export interface LinePattern {
  /** Tells two patterns apart. */
  readonly key: string;
  test(line: string): boolean;
  /** Where it is found, in order: from and to. */
  find(line: string): [number, number][];
}

/**
 * The pattern; a sentence that says why there is none; or null for what the feed alone can search for, which has a
 * limit of time: look-around, back-references, and what is too large.
 */
export function patternOf(text: string, regex: boolean, heedsCase: boolean): LinePattern | string | null {
  if (!regex) {
    return new PlainText(text, heedsCase);
  }
  const flags = /^\(\?([aims]+)\)/.exec(text);
  const source = text.slice(flags?.[0].length ?? 0).replaceAll('(?P<', '(?<');
  try {
    new RegExp(source);
    return new Expression(source, heedsCase && !flags?.[1]!.includes('i'));
  } catch (error) {
    return error instanceof Irregular ? null : (error as Error).message;
  }
}

class PlainText implements LinePattern {
  readonly key: string;
  private readonly escaped: RegExp;

  constructor(text: string, heedsCase: boolean) {
    this.escaped = new RegExp(text.replace(/[.*+?^${}()|[\]\\/-]/g, '\\$&'), heedsCase ? 'g' : 'gi');
    this.key = String(this.escaped);
  }

  test(line: string): boolean {
    this.escaped.lastIndex = 0;
    return this.escaped.test(line);
  }

  find(line: string): [number, number][] {
    return [...line.matchAll(this.escaped)].map(match => [match.index, match.index + match[0].length]);
  }
}

class Expression implements LinePattern {
  readonly key: string;
  private readonly anywhere: Automaton;
  private readonly here: Automaton;

  /** Throws `Irregular`. */
  constructor(source: string, heedsCase: boolean) {
    const program = new Program(parse(source, heedsCase));
    this.anywhere = new Automaton(program, true);
    this.here = new Automaton(program, false);
    this.key = `/${source}/${heedsCase ? '' : 'i'}`;
  }

  test(line: string): boolean {
    return this.anywhere.finds(line);
  }

  /** The longest ones; those of no character are left out. */
  find(line: string): [number, number][] {
    const found: [number, number][] = [];
    let at = 0;
    while (at < line.length && this.anywhere.finds(line, at)) {
      let end = this.here.longest(line, at);
      while (end <= at && at < line.length) {
        end = this.here.longest(line, ++at);
      }
      if (end > at) {
        found.push([at, end]);
        at = end;
      }
    }
    return found;
  }
}
