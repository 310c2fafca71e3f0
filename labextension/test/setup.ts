/** What jsdom does not have, and Lumino and JupyterLab's components ask for when they are imported. */
globalThis.DragEvent ??= class extends MouseEvent {} as unknown as typeof DragEvent;
window.matchMedia ??= (query: string) =>
  ({ matches: false, media: query, addEventListener() {}, removeEventListener() {} }) as unknown as MediaQueryList;
globalThis.CSSStyleSheet.prototype.replaceSync ??= () => undefined;
