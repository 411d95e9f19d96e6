// Runs JavaScript and TypeScript piece by piece, as the console of a browser does: V8's own REPL mode knows top-level await, and lets names be
// declared again. Commands come in lines of JSON on one pipe, which a thread of its own reads; answers go out on another.
'use strict'
const { Worker, isMainThread, parentPort, workerData } = require('node:worker_threads')
const fs = require('node:fs')
const inspector = require('node:inspector')

// What both threads know: the numbers of the execution that was begun last, and of the last one that is over.
const RUNNING = 0
const FINISHED = 1

if (isMainThread) main()
else listen()

/** The thread that hears commands. */
function listen() {
  const state = new Int32Array(workerData.state)
  // Only the execution that is meant: not before it has begun, and never the one after it.
  function interrupt(number) {
    if (Atomics.load(state, FINISHED) >= number) return
    if (Atomics.load(state, RUNNING) !== number) return void setTimeout(interrupt, 10, number)
    parentPort.postMessage({ type: 'interrupt', number })
  }
  let text = ''
  const commands = fs.createReadStream(null, { fd: workerData.commands, encoding: 'utf8' })
  commands.on('data', (data) => {
    const lines = (text + data).split('\n')
    text = lines.pop()
    for (const line of lines) {
      const command = JSON.parse(line)
      if (command.type === 'interrupt') interrupt(command.number)
      else parentPort.postMessage(command)
    }
  })
  commands.on('end', () => parentPort.postMessage({ type: 'end' }))
}

function main() {
  const { createRequire, stripTypeScriptTypes } = require('node:module')
  const { pathToFileURL } = require('node:url')
  const util = require('node:util')
  const acorn = require('acorn')

  const typescript = process.argv[2] === 'typescript'
  const [commands, answers] = process.argv.slice(3).map(Number)
  process.argv.splice(1)
  const here = pathToFileURL(process.cwd() + '/').href
  const session = new inspector.Session()
  session.connect()

  const state = new Int32Array(new SharedArrayBuffer(8))
  /** The execution that is under way: its number, and its way to its end. */
  let running = null

  function answer(value) {
    let data = Buffer.from(JSON.stringify(value) + '\n')
    while (data.length) data = data.subarray(fs.writeSync(answers, data))
  }

  const post = (method, params) =>
    new Promise((done, failed) => session.post(method, params, (error, value) => (error ? failed(error) : done(value))))

  /** The value itself, of which the inspector gives a description. */
  async function valueOf(object) {
    if (!('objectId' in object) && 'value' in object) return object.value
    if (object.type === 'undefined') return undefined
    let value
    globalThis[hidden] = (given) => { value = given }
    const argument = 'objectId' in object ? { objectId: object.objectId } : { unserializableValue: object.unserializableValue }
    const global = await post('Runtime.evaluate', { expression: 'globalThis' })
    const take = 'function (value) { this[Symbol.for("code-interpreter.value")](value) }'
    await post('Runtime.callFunctionOn', { objectId: global.result.objectId, functionDeclaration: take, arguments: [argument] })
    delete globalThis[hidden]
    return value
  }
  const hidden = Symbol.for('code-interpreter.value')

  async function show(value, main, raw) {
    const custom = value?.[Symbol.for('Jupyter.display')]
    if (raw) answer({ type: 'result', main, data: value })
    else if (typeof custom === 'function') answer({ type: 'result', main, data: await custom.call(value) })
    else answer({ type: 'result', main, data: { 'text/plain': util.inspect(value) } })
  }

  // As in Deno's kernel: `raw` gives a bundle of representations by their types.
  Object.defineProperty(globalThis, 'display', {
    value: (value, options = {}) => show(value, false, options.raw === true), configurable: true, writable: true,
  })
  const load = (name, options) => import(/^\.{0,2}\//.test(name) ? new URL(name, here).href : resolved(name), options)
  const nearby = createRequire(here)
  function resolved(name) {
    try {
      const found = nearby.resolve(name)
      return found.startsWith('/') ? pathToFileURL(found).href : found
    } catch {
      return name
    }
  }
  Object.assign(globalThis, { require: nearby })
  Object.defineProperty(globalThis, '__import', { value: load })

  /** Code that the inspector evaluates cannot import: imports become calls. */
  function withImports(code) {
    if (!/\bimport\b/.test(code)) return code
    let tree
    const edits = []
    try {
      tree = acorn.parse(code, { ecmaVersion: 'latest', sourceType: 'module', allowAwaitOutsideFunction: true, allowReturnOutsideFunction: true })
    } catch {
      return code
    }
    visit(tree, (node) => {
      if (node.type === 'ImportDeclaration') edits.push([node.start, node.end, declaration(node)])
      if (node.type === 'ImportExpression') edits.push([node.start, node.start + 'import'.length, '__import'])
    })
    edits.sort((a, b) => b[0] - a[0])
    return edits.reduce((text, [start, end, by]) => text.slice(0, start) + by + text.slice(end), code)
  }

  function visit(node, look) {
    if (Array.isArray(node)) return node.forEach((part) => visit(part, look))
    if (typeof node?.type !== 'string') return
    look(node)
    Object.values(node).forEach((part) => typeof part === 'object' && visit(part, look))
  }

  function declaration(node) {
    const module = `await __import(${JSON.stringify(node.source.value)})`
    const whole = node.specifiers.find((one) => one.type === 'ImportNamespaceSpecifier')
    const parts = node.specifiers.filter((one) => one !== whole).map((one) => {
      const name = one.type === 'ImportDefaultSpecifier' ? 'default' : one.imported.name ?? JSON.stringify(one.imported.value)
      return `${name}: ${one.local.name}`
    })
    if (!node.specifiers.length) return `${module};`
    const bound = whole ? `const ${whole.local.name} = ${module};` : ''
    return bound + (parts.length ? `const { ${parts.join(', ')} } = ${whole ? whole.local.name : module};` : '')
  }

  function described(error) {
    if (!(error instanceof Error) && typeof error?.stack !== 'string') {
      const text = util.inspect(error)
      return { type: 'error', name: 'Error', value: text, traceback: `Uncaught ${text}` }
    }
    // Only the frames of the code itself.
    const lines = String(error.stack).split('\n')
    const own = lines.findIndex((line) => /at Session\.post|at .*kernel\.js/.test(line))
    const traceback = (own < 0 ? lines : lines.slice(0, own)).join('\n')
    return { type: 'error', name: String(error.name), value: String(error.message), traceback }
  }

  async function execute({ code, env, number }) {
    const before = Object.fromEntries(Object.keys(env).map((name) => [name, process.env[name]]))
    Object.assign(process.env, env)
    const interrupted = new Promise((end) => { running = { number, end } })
    const name = `\n//# sourceURL=cell-${number}`
    Atomics.store(state, RUNNING, number)
    try {
      const plain = typescript ? stripTypeScriptTypes(code, { mode: 'transform' }) : code
      const evaluated = post('Runtime.evaluate', { expression: withImports(plain) + name, replMode: true, awaitPromise: true })
      const outcome = await Promise.race([evaluated, interrupted])
      if (outcome === 'interrupted') {
        // Nobody is there any more who would want to know.
      } else if (outcome.exceptionDetails) {
        answer(described(await valueOf(outcome.exceptionDetails.exception ?? outcome.result)))
      } else {
        const value = await valueOf(outcome.result)
        if (value !== undefined) await show(value, true)
      }
    } catch (error) {
      answer(described(error))
    }
    running = null
    Atomics.store(state, FINISHED, number)
    for (const [name, value] of Object.entries(before)) {
      if (value === undefined) delete process.env[name]
      else process.env[name] = value
    }
    answer({ type: 'end' })
  }

  // What fails in the background is said, and ends nothing.
  process.on('SIGINT', () => {})
  process.on('uncaughtException', (error) => console.error('Uncaught', error))
  process.on('unhandledRejection', (error) => console.error('Uncaught (in promise)', error))
  const thread = new Worker(__filename, { workerData: { commands, state: state.buffer } })
  thread.on('message', (command) => {
    if (command.type === 'execute') execute(command)
    else if (command.type === 'end') process.exit()
    else if (command.number === running?.number) running.end('interrupted')
  })
}
