// A coding agent that has one computer for all of its sessions. See coding_agent.py, which does the same.
import assert from 'node:assert/strict'
import { execFileSync } from 'node:child_process'
import { mkdtempSync, readFileSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { CommandExitError, Sandbox } from 'e2b'

interface Task {
  name: string
  test: string
  attempts: string[]
}

const project = join(import.meta.dirname, 'project')
const repository = '/home/user/textkit'
const within = { cwd: repository }

/** The project as a Git repository in one file, as `git bundle` makes it. */
function bundle(): Uint8Array {
  const folder = mkdtempSync(join(tmpdir(), 'textkit-'))
  const git = (...args: string[]) => execFileSync('git', ['-C', folder, '--work-tree', project, ...args])
  try {
    execFileSync('git', ['init', '--quiet', '--initial-branch=main', folder])
    git('add', '--all')
    git('-c', 'user.name=Example', '-c', 'user.email=example@localhost', 'commit', '--quiet', '--message=Begin')
    return git('bundle', 'create', '-', 'main')
  } finally {
    rmSync(folder, { recursive: true })
  }
}

async function setUp(box: Sandbox): Promise<number> {
  await box.files.write('/tmp/textkit.bundle', new Blob([bundle()]))
  await box.git.clone('/tmp/textkit.bundle', { path: repository, branch: 'main' })
  await box.git.configureUser('Agent', 'agent@localhost')
  const install = 'python3 -m venv --system-site-packages .venv && .venv/bin/pip install --quiet --no-build-isolation --editable .'
  await box.commands.run(install, { ...within, timeoutMs: 900_000 })
  console.log('the project is cloned and installed, once and for all')
  // Something that runs on from session to session, as a watcher or a dev server would.
  const watcher = await box.commands.run('exec sleep infinity', { background: true, timeoutMs: 0 })
  return watcher.pid
}

async function work(box: Sandbox, task: Task): Promise<void> {
  const test = `\n    def test_${task.name}(self):\n        self.assertTrue(${task.test})\n`
  await box.commands.run(`sed -i '/^    pass$/d' tests/test_textkit.py && cat >> tests/test_textkit.py <<'END'${test}END`, within)
  const before = await box.files.read(`${repository}/textkit/__init__.py`)
  for (const [attempt, expression] of task.attempts.entries()) {
    await box.files.write(`${repository}/textkit/__init__.py`, `${before}\n\ndef ${task.name}(text):\n    return ${expression}\n`)
    try {
      await box.commands.run('.venv/bin/python -m unittest', within)
      await box.git.add(repository)
      await box.git.commit(repository, `Add ${task.name}`)
      return
    } catch (error) {
      if (!(error instanceof CommandExitError)) throw error
      console.log(`  attempt ${attempt + 1} fails: ${error.stderr.trim().split('\n').at(-1)}`)
    }
  }
  throw new Error(`no attempt at ${task.name} passes its test`)
}

const tasks: Task[] = JSON.parse(readFileSync(join(project, 'tasks.json'), 'utf8'))
let box = await Sandbox.create({ timeoutMs: 1_800_000 })
console.log(`${box.sandboxId} is made`)
try {
  const watcher = await setUp(box)
  for (const [session, task] of tasks.entries()) {
    await work(box, task)
    console.log(`session ${session + 1}: ${task.name} is done and committed`)
    await box.pause()
    box = await Sandbox.connect(box.sandboxId)
  }
  const history = (await box.commands.run('git log --format=%s', within)).stdout.trim().split('\n')
  assert.equal(history.length, 1 + tasks.length)
  assert.equal((await box.commands.run(".venv/bin/textkit slug 'Ten Sessions'", within)).stdout, 'ten-sessions\n')
  assert.ok((await box.commands.list()).some(({ pid }) => pid === watcher), 'what ran in the background is gone')
  console.log(`${tasks.length} sessions, ${history.length} commits, and the background process ${watcher} still runs`)
} finally {
  await box.kill()
}
