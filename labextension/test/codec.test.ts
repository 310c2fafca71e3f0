import { describe, expect, test } from 'vitest';
import { decode, encode, tag } from '../src/codec';

describe('tagged JSON', () => {
  test('numbers that JSON has no form for come back', () => {
    const values = [NaN, Infinity, -Infinity, 2n ** 63n, -(2n ** 70n), 0, 1.5, null, true];
    expect(decode(encode(values))).toEqual(values);
  });

  test('the forms are those of protocol/codec.py', () => {
    expect(decode('["@nan","@inf","@-inf","@int:9007199254740993","@@int:5","@@","@unknown"]')).toEqual([
      NaN,
      Infinity,
      -Infinity,
      9007199254740993n,
      '@int:5',
      '@',
      '@unknown'
    ]);
    expect(encode({ a: '@x', b: 12n, c: undefined })).toBe('{"a":"@@x","b":12}');
  });

  test.each(['@', '@@', '@nan', '@int:3', 'a@', '\ud83d', '\u0000', '__proto__'])('the text %j comes back', text => {
    expect(decode(encode({ text, list: [text] }))).toEqual({ text, list: [text] });
  });

  test('a column of numbers comes as it was, one that is damaged as text', () => {
    expect(decode('{"y":"@f64:AAAAAAAA+D8AAAAAAAD4fwAAAAAAAPD/"}')).toEqual({ y: [1.5, NaN, -Infinity] });
    expect(decode('["@f64:","@f64:AAAA","@f64:!","@@f64:AAAA"]')).toEqual([[], '@f64:AAAA', '@f64:!', '@f64:AAAA']);
  });

  test('an escaped tag is one too', () => {
    expect(decode('"\\u0040nan"')).toBeNaN();
  });

  test('a key of an object is never a tag, and no prototype is touched', () => {
    const value = decode('{"@nan":"@nan","__proto__":{"polluted":"@inf"}}') as Record<string, unknown>;
    expect(value['@nan']).toBeNaN();
    expect(Object.getPrototypeOf(value)).toBe(Object.prototype);
    expect(({} as Record<string, unknown>)['polluted']).toBeUndefined();
  });

  test('what is no large integer stays text; what has no form is refused', () => {
    expect(decode('"@int:0x10"')).toBe('@int:0x10');
    expect(decode('"@constructor"')).toBe('@constructor');
    expect(() => decode('{')).toThrow(SyntaxError);
    expect(() => tag(() => 1)).toThrow(TypeError);
  });
});
