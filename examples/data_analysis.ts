// A data analysis in two languages that goes on after a pause where it was.
// Needs the template of the code interpreter: dorm template build code-interpreter-v1
import assert from 'node:assert/strict'
import { Sandbox, type Execution, type RunCodeOpts } from '@e2b/code-interpreter'

let box = await Sandbox.create({ timeoutMs: 600_000 })
console.log(`${box.sandboxId} is made`)

async function run(code: string, options?: RunCodeOpts): Promise<Execution> {
  const execution = await box.runCode(code, options)
  if (execution.error) throw new Error(execution.error.traceback)
  return execution
}

try {
  const rows = Array.from({ length: 5000 }, (_, n) => `${['a', 'b', 'c'][n % 3]},${n % 17}`)
  await box.files.write('/home/user/data.csv', ['kind,value', ...rows].join('\n'))
  await run("import pandas as pd\ntable = pd.read_csv('data.csv')")
  await run("import fs from 'node:fs'\nconst lines = fs.readFileSync('data.csv', 'utf8').split('\\n').slice(1)\nfs.unlinkSync('data.csv')", { language: 'javascript' })
  console.log('the data are loaded, in Python and in JavaScript, and their file is gone')

  await box.pause()
  console.log('the sandbox is paused')
  box = await Sandbox.connect(box.sandboxId)

  const inPython = (await run('int(table.value.sum())')).text
  const inJavaScript = (await run("lines.map((line) => Number(line.split(',')[1])).reduce((a, b) => a + b)", { language: 'javascript' })).text
  console.log(`the sum is ${inPython} for Python, and ${inJavaScript} for JavaScript`)
  assert.equal(inPython, inJavaScript)

  const { results } = await run("table.groupby('kind').value.mean().plot.pie(title='Means'); import matplotlib.pyplot as plt; plt.show()")
  const chart = results.find((result) => result.chart)?.chart
  console.log(`a ${chart?.type} chart, ${chart?.title}, of ${chart?.elements.length} parts`)
  assert.deepEqual([chart?.type, chart?.elements.length], ['pie', 3])
} finally {
  await box.kill()
}
