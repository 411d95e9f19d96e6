// The code interpreter with the JavaScript SDK.
import assert from 'node:assert/strict'
import { Sandbox, NotFoundError, TimeoutError } from '@e2b/code-interpreter'

const box = await Sandbox.create({ envs: { GIVEN: 'at creation' }, timeoutMs: 3_000_000 })

const run = async (code, options) => {
  const execution = await box.runCode(code, options)
  assert.equal(execution.error, undefined, execution.error?.traceback)
  return execution
}
const javascript = (code, options) => run(code, { language: 'javascript', ...options })

// Python
await run('x = 41')
const heard = []
const second = await run('print("said"); x + 1', { onStdout: (message) => heard.push(message.line), onResult: (result) => heard.push(result.text) })
assert.deepEqual([second.text, second.executionCount, second.logs.stdout, heard], ['42', 2, ['said\n'], ['said\n', '42']])
const failed = await box.runCode('1 / 0')
assert.deepEqual([failed.error.name, failed.error.value], ['ZeroDivisionError', 'division by zero'])
const plot = await run('import matplotlib.pyplot as plt\nplt.bar(["A", "B"], [1, 2]); plt.show()')
assert.ok(plot.results[0].png.startsWith('iVBOR'))
assert.deepEqual([plot.results[0].chart.type, plot.results[0].chart.elements[1].label, plot.results[0].chart.elements[1].value], ['bar', 'B', 2])
assert.equal((await run('import os; os.environ["GIVEN"] + os.environ["MORE"]', { envs: { MORE: ' and more' } })).text, 'at creation and more')

// JavaScript, as one writes it in a console: names may be declared again, and await and import stand anywhere.
await javascript('const list = [1, 2, 3]; function twice(n) { return 2 * n }; class Point { constructor(x) { this.x = x } }')
assert.equal((await javascript('list.map(twice)')).text, '[ 2, 4, 6 ]')
await javascript('const list = [4]')
assert.equal((await javascript('new Point(list[0])')).text, 'Point { x: 4 }')
assert.equal((await javascript("await new Promise((done) => setTimeout(() => done('later'), 10))")).text, 'later')
assert.equal((await javascript('import { basename, sep as slash } from "node:path"\nimport os, * as all from "os"\nbasename("/a/b") + slash + typeof os.cpus + typeof all.cpus')).text, 'b/functionfunction')
assert.equal((await javascript('const { join } = await import("node:path"); join("a", typeof require("fs").readFileSync)')).text, 'a/function')
await box.files.write('/home/user/mine.mjs', 'export const mine = 7; export default "default"')
assert.equal((await javascript('import whole, { mine } from "./mine.mjs"; `${whole} ${mine} import("x")`')).text, 'default 7 import("x")')
const streams = await javascript('console.log("out"); console.error("err"); require("child_process").execSync("echo child", { stdio: "inherit" }); undefined')
assert.deepEqual([streams.logs.stdout.join(''), streams.logs.stderr.join(''), streams.results], ['out\nchild\n', 'err\n', []])
assert.equal((await javascript('process.env.GIVEN + process.env.MORE', { envs: { MORE: '!' } })).text, 'at creation!')
assert.equal((await javascript('process.env.MORE')).text, undefined)
const shown = await javascript('display({ "text/html": "<b>bold</b>" }, { raw: true }); ({ [Symbol.for("Jupyter.display")]: () => ({ "text/markdown": "# own" }) })')
assert.deepEqual(shown.results.map((result) => [result.html, result.markdown, result.isMainResult]), [['<b>bold</b>', undefined, false], [undefined, '# own', true]])
const thrown = await box.runCode('function deep() { throw new TypeError("not so") }\ndeep()', { language: 'js' })
assert.deepEqual([thrown.error.name, thrown.error.value], ['TypeError', 'not so'])
assert.match(thrown.error.traceback, /at deep \(cell-\d+:1:\d+\)\n.*cell-\d+:2:1$/)
assert.equal((await box.runCode('let = =', { language: 'js' })).error.name, 'SyntaxError')
await javascript('setTimeout(() => { throw new Error("in the background") }, 0); Promise.reject(new Error("too")); undefined')
assert.equal((await javascript('list.length')).text, '1')

// TypeScript, bash
const typed = await run('enum Colour { Red, Blue }\ninterface Named { name: string }\nconst who: Named = { name: "me" };\n`${who.name} ${Colour.Blue}`', { language: 'typescript' })
assert.equal(typed.text, 'me 1')
const shell = await box.runCode('name=me; echo "hello $name"; echo oops >&2; false', { language: 'bash' })
assert.deepEqual([shell.logs, shell.error.value], [{ stdout: ['hello me\n'], stderr: ['oops\n'] }, '1'])
assert.deepEqual((await run('echo $name', { language: 'bash' })).logs.stdout, ['me\n'])

// Contexts
const context = await box.createCodeContext({ cwd: '/tmp', language: 'javascript' })
assert.deepEqual([context.language, context.cwd], ['javascript', '/tmp'])
assert.equal((await run('process.cwd() + typeof list', { context })).text, '/tmpundefined')
assert.ok((await box.listCodeContexts()).some(({ id }) => id === context.id))
await box.restartCodeContext(context)
await box.removeCodeContext(context.id)
await assert.rejects(box.runCode('1', { context }), NotFoundError)
await assert.rejects(box.runCode('await new Promise(() => {})', { language: 'javascript', timeoutMs: 1000 }), TimeoutError)
assert.equal((await javascript('list.length')).text, '1')

// Asleep and awake
await box.pause()
await box.connect()
assert.equal((await run('x')).text, '41')
assert.equal((await javascript('list.length')).text, '1')
await box.kill()
// The SDK leaves a timer behind for every request that is refused.
process.exit()
