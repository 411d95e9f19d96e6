// Commands, terminals, files and git of the JavaScript SDK.
import assert from 'node:assert/strict'
import { CommandExitError, FileNotFoundError, Sandbox, TimeoutError } from 'e2b'
import { until } from './support.mjs'

const box = await Sandbox.create()

// Commands.
const result = await box.commands.run('echo out; echo err >&2')
assert.deepEqual([result.stdout, result.stderr, result.exitCode], ['out\n', 'err\n', 0])
await assert.rejects(
  () => box.commands.run('exit 7'),
  (error) => error instanceof CommandExitError && error.exitCode === 7
)
assert.equal((await box.commands.run('pwd; id -un', { cwd: '/tmp', user: 'root' })).stdout, '/tmp\nroot\n')
await assert.rejects(() => box.commands.run('sleep 30', { timeoutMs: 1000 }), TimeoutError)
let seen = ''
const cat = await box.commands.run('cat', {
  background: true,
  stdin: true,
  timeoutMs: 0,
  onStdout: (data) => void (seen += data),
})
await box.commands.sendStdin(cat.pid, 'one\n')
await cat.sendStdin('two\n')
await box.commands.closeStdin(cat.pid)
assert.equal((await cat.wait()).stdout, 'one\ntwo\n')
assert.equal(seen, 'one\ntwo\n')
const sleeper = await box.commands.run('sleep 600', { background: true, timeoutMs: 0 })
await sleeper.disconnect()
assert((await box.commands.list()).some((one) => one.pid === sleeper.pid))
const found = await box.commands.connect(sleeper.pid)
assert.equal(await found.kill(), true)
await assert.rejects(() => found.wait(), CommandExitError)
assert.equal(await box.commands.kill(sleeper.pid), false)
const many = await Promise.all([...Array(20).keys()].map((n) => box.commands.run(`sleep 0.1; echo ${n}`)))
assert.deepEqual(many.map((one) => Number(one.stdout)), [...Array(20).keys()])

// A terminal.
let screen = ''
const terminal = await box.pty.create({ cols: 80, rows: 24, timeoutMs: 0, onData: (data) => void (screen += Buffer.from(data)) })
await box.pty.resize(terminal.pid, { cols: 90, rows: 30 })
await box.pty.sendInput(terminal.pid, new TextEncoder().encode('stty size; exit\n'))
await terminal.wait()
assert(screen.includes('30 90'), screen)
const left = await box.pty.create({ cols: 80, rows: 24, timeoutMs: 0, onData: () => {} })
await left.disconnect()
const back = await box.pty.connect(left.pid)
assert.equal(back.pid, left.pid)
assert.equal(await box.pty.kill(left.pid), true)

// Files.
const { files } = box
assert.equal((await files.write('a/file', 'text')).path, '/home/user/a/file')
assert.equal(await files.read('a/file'), 'text')
const bytes = new Uint8Array(1 << 20).map((_, n) => n % 251)
await files.write('bytes', bytes.buffer)
assert.deepEqual(Buffer.from(await files.read('bytes', { format: 'bytes' })), Buffer.from(bytes))
assert.equal((await files.read('bytes', { format: 'blob' })).size, bytes.length)
let length = 0
for await (const chunk of await files.read('bytes', { format: 'stream' })) length += chunk.length
assert.equal(length, bytes.length)
await files.write('zipped', 'x'.repeat(10_000), { gzip: true })
assert.equal((await files.read('zipped', { gzip: true })).length, 10_000)
await files.write('streamed', new Blob(['from a stream']).stream())
assert.equal(await files.read('streamed'), 'from a stream')
const written = await files.write([{ path: 'm/1', data: '1' }, { path: 'm/2', data: '2' }])
assert.equal(written.length, 2)
assert.deepEqual((await files.list('m')).map((one) => one.name).sort(), ['1', '2'])
assert.equal(await files.makeDir('d'), true)
assert.equal(await files.makeDir('d'), false)
assert.equal((await files.getInfo('m/1')).size, 1)
assert.equal((await files.rename('m/1', 'd/moved')).name, 'moved')
assert.equal(await files.exists('m/1'), false)
await files.remove('m')
await assert.rejects(() => files.read('m/2'), FileNotFoundError)
const events = []
const watching = await files.watchDir('d', (event) => void events.push(`${event.type} ${event.name}`), { recursive: true })
await files.write('d/new', '1')
await until('the new file is seen', () => events.includes('create new'))
await watching.stop()

// Signed URLs.
await files.write('signed', 'by a URL')
const url = await box.downloadUrl('signed', { useSignatureExpiration: 60 })
assert.equal(await (await fetch(url)).text(), 'by a URL')
const form = new FormData()
form.append('file', new Blob(['sent']), 'sent')
const answer = await fetch(await box.uploadUrl('sent'), { method: 'POST', body: form })
assert.equal(answer.status, 200, await answer.text())
assert.equal(await files.read('sent'), 'sent')
assert.equal((await fetch(url.replace('path=signed', 'path=sent'))).status, 401)

// Git.
const { git } = box
await git.configureUser('Tester', 'tester@example.com')
await git.setConfig('pull.rebase', 'false')
assert.equal(await git.getConfig('user.name'), 'Tester')
await git.init('/home/user/origin.git', { bare: true })
await git.init('/home/user/work', { initialBranch: 'main' })
await files.write('work/file', 'one')
assert.equal((await git.status('/home/user/work')).isClean, false)
await git.add('/home/user/work')
await git.commit('/home/user/work', 'First')
await git.remoteAdd('/home/user/work', 'origin', '/home/user/origin.git')
assert.equal(await git.remoteGet('/home/user/work', 'origin'), '/home/user/origin.git')
await git.push('/home/user/work', { remote: 'origin', branch: 'main', setUpstream: true })
await git.clone('/home/user/origin.git', { path: '/home/user/copy', branch: 'main' })
assert.equal(await files.read('copy/file'), 'one')
await git.pull('/home/user/copy')
await git.createBranch('/home/user/work', 'side')
assert.equal((await git.branches('/home/user/work')).currentBranch, 'side')
await git.checkoutBranch('/home/user/work', 'main')
await git.deleteBranch('/home/user/work', 'side')
await files.write('work/file', 'changed')
await git.add('/home/user/work')
await git.reset('/home/user/work')
await git.restore('/home/user/work', { paths: ['file'] })
assert.equal(await files.read('work/file'), 'one')
await git.dangerouslyAuthenticate({ username: 'someone', password: 'a-token' })

assert.equal(await box.kill(), true)
