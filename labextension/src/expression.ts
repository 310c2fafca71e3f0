/**
 * Regular expressions as trees: what JavaScript and Python write alike, without look-around and back-references,
 * which no automaton can follow. Pure.
 */

export type Edge = 'start' | 'end' | 'word' | 'inside';

export type Tree =
  | { is: 'one'; of: Codes }
  | { is: 'edge'; edge: Edge }
  | { is: 'all'; parts: Tree[] }
  | { is: 'any'; parts: Tree[] }
  | { is: 'repeat'; part: Tree; least: number; most: number };

/** Whether a UTF-16 code is among them. */
export type Codes = (code: number) => boolean;

/** An expression that is one, but needs more than an automaton. */
export class Irregular extends Error {}

const LETTER = /[\p{L}\p{N}_]/u;
const DIGIT = /\p{Nd}/u;
const BLANK = /\s/;

function among(class_: RegExp): Codes {
  const ascii = Array.from({ length: 128 }, (_, code) => class_.test(String.fromCharCode(code)));
  return code => (code < 128 ? ascii[code]! : class_.test(String.fromCharCode(code)));
}

/** As Python's, which searches the rest: letters and digits of every script. */
export const isWord = among(LETTER);

const CLASSES: Record<string, Codes> = { w: isWord, d: among(DIGIT), s: among(BLANK) };
const EDGES: Record<string, Edge> = { b: 'word', B: 'inside', A: 'start', Z: 'end' };
const CONTROLS: Record<string, number> = { t: 9, n: 10, v: 11, f: 12, r: 13, a: 7, '0': 0 };
const NEWLINE = 10;

const not =
  (codes: Codes): Codes =>
  code =>
    !codes(code);

/** The tree of `source`, which JavaScript takes for an expression. Throws `Irregular`. */
export function parse(source: string, heedsCase: boolean): Tree {
  return new Parser(source, heedsCase).whole();
}

class Parser {
  private at = 0;

  constructor(
    private readonly source: string,
    private readonly heedsCase: boolean
  ) {}

  whole(): Tree {
    const tree = this.alternatives();
    if (this.at < this.source.length) {
      throw new Irregular(this.source);
    }
    return tree;
  }

  private get next(): string {
    return this.source[this.at] ?? '';
  }

  private takes(text: string): boolean {
    const there = this.source.startsWith(text, this.at);
    this.at += there ? text.length : 0;
    return there;
  }

  private match(expression: RegExp): RegExpExecArray | null {
    const found = expression.exec(this.source.slice(this.at));
    this.at += found ? found[0].length : 0;
    return found;
  }

  private alternatives(): Tree {
    const parts = [this.sequence()];
    while (this.takes('|')) {
      parts.push(this.sequence());
    }
    return parts.length > 1 ? { is: 'any', parts } : parts[0]!;
  }

  private sequence(): Tree {
    const parts: Tree[] = [];
    while (this.next !== '' && this.next !== '|' && this.next !== ')') {
      parts.push(this.repeated(this.atom()));
    }
    return parts.length === 1 ? parts[0]! : { is: 'all', parts };
  }

  private repeated(part: Tree): Tree {
    const found = this.match(/^(?:[*+?]|\{(\d+)(,?)(\d*)\})/);
    if (!found) {
      return part;
    }
    this.takes('?'); // a lazy one finds the same lines
    const [text, low, comma, high] = found;
    const simple: Record<string, [number, number]> = { '*': [0, Infinity], '+': [1, Infinity], '?': [0, 1] };
    const counted = [Number(low), comma ? (high ? Number(high) : Infinity) : Number(low)] as const;
    const [least, most] = simple[text] ?? counted;
    return { is: 'repeat', part, least, most };
  }

  private atom(): Tree {
    const character = this.next;
    this.at++;
    switch (character) {
      case '(':
        return this.group();
      case '[':
        return { is: 'one', of: this.set() };
      case '^':
        return { is: 'edge', edge: 'start' };
      case '$':
        return { is: 'edge', edge: 'end' };
      case '.':
        return { is: 'one', of: code => code !== NEWLINE };
      case '\\':
        return this.escape();
      default:
        return this.literal(character.charCodeAt(0));
    }
  }

  private group(): Tree {
    if (this.next === '?' && !this.match(/^\?(?::|<[\p{L}_$][\p{L}\p{N}_$]*>)/u)) {
      throw new Irregular(this.source);
    }
    const tree = this.alternatives();
    if (!this.takes(')')) {
      throw new Irregular(this.source);
    }
    return tree;
  }

  private literal(code: number): Tree {
    return { is: 'one', of: this.folded(other => other === code) };
  }

  private escape(): Tree {
    const edge = EDGES[this.next];
    if (edge) {
      this.at++;
      return { is: 'edge', edge };
    }
    if (/^[1-9k]/.test(this.next)) {
      throw new Irregular(this.source);
    }
    const found = this.escaped();
    return typeof found === 'number' ? this.literal(found) : { is: 'one', of: found };
  }

  /** What stands behind a backslash, in a set or outside: one code, or several. */
  private escaped(): number | Codes {
    const hex = this.match(/^(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4}))/);
    if (hex) {
      return parseInt(hex[1] ?? hex[2]!, 16);
    }
    const character = this.next;
    this.at++;
    const codes = CLASSES[character.toLowerCase()];
    if (codes) {
      return character === character.toLowerCase() ? codes : not(codes);
    }
    if (/[cpPuxNz]/.test(character)) {
      throw new Irregular(this.source);
    }
    return CONTROLS[character] ?? character.charCodeAt(0);
  }

  private set(): Codes {
    const negated = this.takes('^');
    const parts: Codes[] = [];
    while (this.next !== ']') {
      if (this.next === '') {
        throw new Irregular(this.source);
      }
      parts.push(this.member());
    }
    this.at++;
    const codes = this.folded(code => parts.some(part => part(code)));
    return negated ? not(codes) : codes;
  }

  private member(): Codes {
    const low = this.bound();
    const ranges = this.next === '-' && this.source[this.at + 1] !== ']' && typeof low === 'number';
    if (!ranges) {
      return typeof low === 'number' ? code => code === low : low;
    }
    this.at++;
    const high = this.bound();
    if (typeof high === 'number') {
      return code => code >= low && code <= high;
    }
    return code => code === low || code === 45 || high(code);
  }

  private bound(): number | Codes {
    if (!this.takes('\\')) {
      return this.source.charCodeAt(this.at++);
    }
    return this.takes('b') ? 8 : this.escaped();
  }

  private folded(codes: Codes): Codes {
    if (this.heedsCase) {
      return codes;
    }
    return code => {
      const character = String.fromCharCode(code);
      const others = [character.toLowerCase(), character.toUpperCase()];
      return codes(code) || others.some(other => other.length === 1 && codes(other.charCodeAt(0)));
    };
  }
}
