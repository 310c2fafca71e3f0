import { defineConfig } from 'vitest/config';

export default defineConfig({
  test: {
    testTimeout: 30_000, // a busy machine takes its time; nothing here is timed
    environment: 'jsdom',
    // One world for all files: JupyterLab's packages are loaded once, which is most of what a file costs.
    pool: 'threads',
    poolOptions: { threads: { singleThread: true } },
    isolate: false,
    include: ['test/**/*.test.ts'],
    setupFiles: ['test/setup.ts']
  },
  // JupyterLab's packages are compiled for bundlers: imports without file endings, and styles among them.
  resolve: { mainFields: ['module', 'main'] },
  server: { watch: null }
});
