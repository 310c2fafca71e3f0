// The widget (anywidget): one module and one style sheet, with everything in them.
import { build } from 'esbuild';

const common = { bundle: true, minify: true, legalComments: 'none', logLevel: 'warning' };
const to = name => `../jupyter_torchdist/static/${name}`;

await Promise.all([
  build({ ...common, entryPoints: ['src/widget.ts'], outfile: to('widget.js'), format: 'esm', target: 'es2022' }),
  build({ ...common, entryPoints: ['style/widget.css'], outfile: to('widget.css') })
]);
