// Sandboxes of the JavaScript SDK: create, find, connect, pause, fork, snapshots, time, network, metrics, kill.
import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import http from 'node:http'
import { AuthenticationError, Sandbox, SandboxNotFoundError } from 'e2b'
import { until } from './support.mjs'

const mark = randomUUID()
const metadata = { mark, odd: 'a b&c=ü' }
const box = await Sandbox.create({ metadata, envs: { A: 'ä' }, timeoutMs: 120_000 })
assert(await box.isRunning())
assert.equal((await box.commands.run('echo $A')).stdout, 'ä\n')
const info = await box.getInfo()
assert.equal(info.state, 'running')
assert.deepEqual(info.metadata, metadata)
assert(info.endAt - info.startedAt > 60_000)

async function listed(query, opts = {}) {
  const pages = Sandbox.list({ query: { metadata, ...query }, ...opts })
  const found = []
  while (pages.hasNext) found.push(...(await pages.nextItems()))
  return found.map((one) => one.sandboxId)
}
const other = await Sandbox.create('base', { metadata })
assert.deepEqual(await listed({}), [other.sandboxId, box.sandboxId])
assert.deepEqual(await listed({}, { limit: 1 }), [other.sandboxId, box.sandboxId])
assert.deepEqual(await listed({ state: ['paused'] }), [])

// Pause and connect.
await box.files.write('file', 'kept')
const sleeper = await box.commands.run('sleep 600', { background: true, timeoutMs: 0 })
assert.equal(await box.pause(), true)
assert.equal(await box.pause(), false)
assert.equal((await box.getInfo()).state, 'paused')
assert.deepEqual(await listed({ state: ['paused'] }), [box.sandboxId])
await assert.rejects(() => box.commands.run('true'), SandboxNotFoundError)
const again = await Sandbox.connect(box.sandboxId, { timeoutMs: 200_000 })
assert.equal(await again.files.read('file'), 'kept')
assert((await again.commands.list()).some((one) => one.pid === sleeper.pid))
await box.setTimeout(100_000)
await box.connect()

// Ports.
await other.commands.run('python3 -m http.server 8123', { background: true, timeoutMs: 0 })
const host = other.getHost(8123)
const fetched = () =>
  new Promise((done, fail) => {
    const options = { host: '127.0.0.1', port: Number(host.split(':')[1]), headers: { host } }
    http.get(options, (answer) => done(answer.resume().statusCode)).on('error', fail)
  })
await until('the port answers', async () => (await fetched()) === 200)

// Network, metrics.
await other.updateNetwork({ denyOut: ['203.0.113.0/24'] })
assert.deepEqual((await other.getInfo()).network.denyOut, ['203.0.113.0/24'])
const metrics = await until('there are metrics', async () => {
  const all = await other.getMetrics()
  return all.length > 0 && all
})
assert(metrics[0].memTotal > 0 && metrics[0].cpuCount >= 1)

// Snapshots and forks.
const snapshot = await box.createSnapshot()
const [fork] = await box.fork()
assert(!(fork instanceof Error), String(fork))
assert.equal(await fork.files.read('file'), 'kept')
assert((await fork.commands.list()).some((one) => one.pid === sleeper.pid))
const copy = await Sandbox.create(snapshot.snapshotId)
assert.equal(await copy.files.read('file'), 'kept')
const snapshots = await box.listSnapshots().nextItems()
assert.deepEqual(snapshots.map((one) => one.snapshotId), [snapshot.snapshotId])
assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true)
assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), false)

// The end of its time.
const auto = await Sandbox.create({ lifecycle: { onTimeout: 'pause', autoResume: true } })
await auto.setTimeout(0)
assert.equal((await auto.getInfo()).state, 'paused')
assert.equal((await auto.commands.run('echo woken')).stdout, 'woken\n')

for (const one of [box, other, fork, copy, auto]) assert.equal(await one.kill(), true)
assert.equal(await box.kill(), false)
assert.equal(await box.isRunning(), false)
await assert.rejects(() => Sandbox.connect(box.sandboxId), SandboxNotFoundError)
await assert.rejects(() => Sandbox.create({ apiKey: 'e2b_' + '0'.repeat(40) }), AuthenticationError)
assert.deepEqual(await listed({}), [])
