import { defineConfig } from 'vitest/config';

export default defineConfig({
  // A busy machine takes its time; nothing here is timed.
  test: { testTimeout: 30_000, environment: 'jsdom', include: ['test/**/*.test.ts'], setupFiles: ['test/setup.ts'] },
  // JupyterLab's packages are compiled for bundlers: imports without file endings, and styles among them.
  resolve: { mainFields: ['module', 'main'] },
  server: { watch: null }
});
