/**
 * The JSON of protocol/codec.py. JSON has no NaN or infinity and a browser's numbers end at 2**53, so both travel as
 * strings with a leading `@`; a string that itself begins with `@` gets a second one. Large integers become `bigint`:
 * exact, and never mixed up with what was a string. A column of numbers comes as the base64 of its doubles.
 */

const LARGE = /^@int:-?\d+$/;
const COLUMN = '@f64:';
const NUMBERS: Record<string, number> = { '@nan': NaN, '@inf': Infinity, '@-inf': -Infinity };

/** The value that `dumps` wrote. Throws `SyntaxError` for what is not JSON. */
export function decode(text: string): unknown {
  const value: unknown = JSON.parse(text);
  // Most messages are lines of ranks and have no tag: they need no second walk.
  return text.includes('"@') || text.includes('\\u0040') ? untag(value) : value;
}

/** One line of JSON. Throws `TypeError` for what has no JSON form. */
export function encode(value: unknown): string {
  return JSON.stringify(tag(value));
}

/** Parsed JSON with its tags resolved. Arrays and objects are changed in place and returned. */
export function untag(value: unknown): unknown {
  if (typeof value === 'string') {
    return value.startsWith('@') ? untagText(value) : value;
  }
  if (Array.isArray(value)) {
    for (let i = 0; i < value.length; i++) {
      const item: unknown = value[i];
      // Long arrays are of numbers (curves): no call for these.
      if (typeof item === 'string' || typeof item === 'object') {
        value[i] = untag(item);
      }
    }
  } else if (value !== null && typeof value === 'object') {
    const record = value as Record<string, unknown>;
    for (const key of Object.keys(record)) {
      record[key] = untag(record[key]);
    }
  }
  return value;
}

function untagText(value: string): unknown {
  if (value.startsWith('@@')) {
    return value.slice(1);
  }
  if (LARGE.test(value)) {
    return BigInt(value.slice(5));
  }
  if (value.startsWith(COLUMN)) {
    return column(value.slice(COLUMN.length)) ?? value;
  }
  return Object.hasOwn(NUMBERS, value) ? NUMBERS[value] : value;
}

/** Little-endian, as every browser's own numbers are. Null for what is none. */
function column(base64: string): number[] | null {
  try {
    const bytes = Uint8Array.from(atob(base64), character => character.charCodeAt(0));
    return Array.from(new Float64Array(bytes.buffer));
  } catch {
    return null;
  }
}

/** A copy of `value` that JSON can carry. */
export function tag(value: unknown): unknown {
  switch (typeof value) {
    case 'string':
      return value.startsWith('@') ? '@' + value : value;
    case 'number':
      return Number.isFinite(value) ? value : Number.isNaN(value) ? '@nan' : value > 0 ? '@inf' : '@-inf';
    case 'bigint':
      return isSafe(value) ? Number(value) : `@int:${value}`;
    case 'boolean':
      return value;
    case 'object':
      return tagObject(value);
    default:
      throw new TypeError(`a ${typeof value} has no JSON form`);
  }
}

function isSafe(value: bigint): boolean {
  return value >= BigInt(Number.MIN_SAFE_INTEGER) && value <= BigInt(Number.MAX_SAFE_INTEGER);
}

function tagObject(value: object | null): unknown {
  if (value === null) {
    return null;
  }
  if (Array.isArray(value)) {
    return value.map(tag);
  }
  const entries = Object.entries(value).filter(([, item]) => item !== undefined);
  return Object.fromEntries(entries.map(([key, item]) => [key, tag(item)]));
}
