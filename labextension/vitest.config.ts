import { defineConfig } from 'vitest/config';

export default defineConfig({
  test: { environment: 'jsdom', include: ['test/**/*.test.ts'], setupFiles: ['test/setup.ts'] },
  // JupyterLab's packages are compiled for bundlers: imports without file endings, and styles among them.
  resolve: { mainFields: ['module', 'main'] },
  server: { watch: null }
});
