// Templates of the JavaScript SDK: what their builder can ask for, and what becomes of it.
import assert from 'node:assert/strict'
import fs from 'node:fs'
import os from 'node:os'
import path from 'node:path'
import {
  BuildError,
  Sandbox,
  Template,
  defaultBuildLogger,
  waitForFile,
  waitForPort,
  waitForProcess,
  waitForTimeout,
  waitForURL,
} from 'e2b'
import { SUDO, until } from './support.mjs'

const context = fs.mkdtempSync(path.join(os.tmpdir(), 'context-'))
fs.mkdirSync(path.join(context, 'app/sub'), { recursive: true })
fs.writeFileSync(path.join(context, 'app/main.py'), 'print()\n')
fs.writeFileSync(path.join(context, 'app/sub/data.txt'), 'data\n')
fs.writeFileSync(path.join(context, 'one.txt'), 'one\n')
fs.writeFileSync(path.join(context, 'two.txt'), 'two\n')
fs.symlinkSync('one.txt', path.join(context, 'link'))

const template = (options = {}) => Template({ fileContextPath: context, ...options })
const run = async (box, command, options) => (await box.commands.run(command, options)).stdout.trim()
const fails = async (promise, word) => {
  await assert.rejects(promise, (error) => {
    assert.ok(error instanceof BuildError && error.message.includes(word), `${error}`)
    return true
  })
}

const tools = 'apt-get pip npm bun mcp-gateway devcontainer'
const shim = `for tool in ${tools}; do printf '#!/bin/sh\\necho "$(basename $0) $*" >>/var/calls\\n' >/usr/local/bin/$tool; done
chmod 755 /usr/local/bin/*; touch /var/calls; chmod 666 /var/calls`
const logs = []
const logger = defaultBuildLogger({ minLevel: 'error' })
const built = await Template.build(
  template()
    .fromBaseImage()
    .runCmd(shim, { user: 'root' })
    .runCmd(['id -un >/tmp/who', 'pwd >/tmp/where'])
    .copy('app', '/srv/app', { user: 'root', mode: 0o640 })
    .copy(['one.txt', 'two.txt'], 'files/', { forceUpload: true })
    .copyItems([{ src: 'link', dest: 'resolved', resolveSymlinks: true }, { src: '*.txt', dest: 'all' }])
    .copy('link', 'kept', { gzip: false })
    .makeDir(['made/a', 'made/b'], { mode: 0o700 })
    .rename('made/a', 'made/c')
    .makeSymlink('two.txt', 'files/symlink')
    .remove('made/b', { recursive: true, force: true })
    .setEnvs({ FLAVOUR: 'vanilla' })
    .runCmd('echo $FLAVOUR >/tmp/flavour')
    .setWorkdir('work')
    .setUser('dev')
    .runCmd('id -un >/tmp/made-by')
    .pipInstall(['numpy', 'pandas'])
    .npmInstall('typescript', { g: true })
    .bunInstall('tsx', { dev: true })
    .aptInstall(['vim'], { fixMissing: true })
    .runCmd('git init -q --bare /tmp/origin.git')
    .gitClone('/tmp/origin.git', '/tmp/cloned', { depth: 1 })
    .skipCache()
    .runCmd('for n in $(seq 250); do echo line $n; done'),
  'js-tools',
  {
    cpuCount: 1,
    memoryMB: 300,
    onBuildLogs: (entry) => {
      logs.push(entry.message)
      logger(entry)
    },
  },
)
assert.equal(built.templateId, 'js-tools')
const lines = logs.filter((message) => message.startsWith('line '))
assert.deepEqual(lines, Array.from({ length: 250 }, (_, n) => `line ${n + 1}`))
const box = await Sandbox.create('js-tools')
const info = await box.getInfo()
assert.deepEqual([info.templateId, info.cpuCount, info.memoryMB], ['js-tools', 1, 300])
assert.equal(await run(box, 'cat /tmp/who /tmp/where /tmp/flavour; id -un; pwd'), 'user\n/home/user\nvanilla\ndev\n/home/user/work')
assert.equal(await run(box, "cd /srv/app && stat -c '%n %U %a' main.py sub/data.txt", { user: 'root' }), 'main.py root 640\nsub/data.txt root 640')
assert.equal(await run(box, 'cd /home/user && cat files/*.txt; readlink kept; test ! -L resolved && cat resolved; ls all made'), 'one\ntwo\none.txt\none\nall:\none.txt\ntwo.txt\n\nmade:\nc')
assert.equal(
  await run(box, 'test -d /tmp/cloned/.git; cat /var/calls'),
  'pip install numpy pandas\nnpm install -g typescript\nbun install --dev tsx\napt-get update\napt-get install -y --fix-missing vim',
)
await box.kill()

const again = () => template().fromTemplate('js-tools').runCmd('cat /proc/sys/kernel/random/uuid >/tmp/built')
await Template.build(again(), 'js-again:v1', { tags: ['stable'] })
const stamp = await run(await Sandbox.create('js-again:v1'), 'cat /tmp/built')
const second = await Template.build(again(), { alias: 'js-again:v1' })
assert.equal(await run(await Sandbox.create('js-again:v1'), 'cat /tmp/built'), stamp)
await Template.build(again(), 'js-again:v1', { skipCache: true })
assert.notEqual(await run(await Sandbox.create('js-again:v1'), 'cat /tmp/built'), stamp)
assert.ok(second.buildId)

assert.ok((await Template.exists('js-again:v1')) && !(await Template.aliasExists('js-again')))
const tagged = await Template.assignTags('js-again:stable', ['default', 'prod'])
assert.deepEqual(tagged.tags, ['default', 'prod'])
await Template.removeTags('js-again', ['prod', 'v1'])
assert.deepEqual((await Template.getTags('js-again')).map((one) => one.tag).sort(), ['default', 'stable'])

await Template.build(
  template().fromTemplate('js-tools').setStartCmd('cd /srv && exec python3 -m http.server 8123', waitForPort(8123)),
  'js-port',
)
assert.match(await run(await Sandbox.create('js-port'), 'curl -s http://localhost:8123/'), /Directory listing/)
const readies = [waitForURL('http://localhost:8123/'), waitForProcess('python3'), waitForFile('/etc/passwd'), waitForTimeout(1000)]
for (const ready of readies) {
  await Template.build(template().fromTemplate('js-port').setReadyCmd(ready), 'js-ready')
  await Sandbox.create('js-ready')
}

await fails(Template.build(template().fromTemplate('js-tools').runCmd('echo a word; exit 7'), 'js-broken'), 'exit code 7')
assert.ok(!(await Template.exists('js-broken')))
const slow = template().fromTemplate('js-tools').runCmd('echo it begins; until test -e /nowhere; do sleep 0.1; done')
const background = await Template.buildInBackground(slow, 'js-slow')
const status = await until('it begins', async () => {
  const found = await Template.getBuildStatus(background, { logsOffset: 0 })
  return found.logEntries.some((entry) => entry.message === 'it begins') && found
})
assert.equal(status.status, 'building')

for (const name of ['python:3', 'mine:1']) await Template.build(template().fromTemplate('js-tools'), name)
const makers = [
  template().fromImage('registry.example.org:5000/team/mine:1', { username: 'me', password: 'secret' }),
  template().fromAWSRegistry('1.dkr.ecr.eu.amazonaws.com/mine:1', { accessKeyId: 'id', secretAccessKey: 's', region: 'eu' }),
  template().fromGCPRegistry('gcr.io/project/mine:1', { serviceAccountJSON: { type: 'service_account' } }),
  template().fromPythonImage(),
  template().fromDockerfile('FROM python:3\nWORKDIR /srv\nCOPY two.txt /srv/\nRUN cat two.txt >read\n'),
]
for (const maker of makers) await Template.build(maker, 'js-of-image')
assert.equal(await run(await Sandbox.create('js-of-image'), 'cat /srv/read'), 'two')
const missing = {
  'ubuntu:24.04': template().fromUbuntuImage('24.04'),
  'node:lts': template().fromNodeImage(),
  'alpine:3.24': template().fromAlpineImage(),
  'fedora:44': template().fromFedoraImage(),
  'archlinux:latest': template().fromArchImage(),
  'bun:latest': template().fromBunImage(),
  'debian:12': template().fromDebianImage('12'),
}
for (const [image, builder] of Object.entries(missing)) await fails(Template.build(builder, 'x'), `dorm template import ${image} `)

for (const name of ['mcp-gateway', 'devcontainer']) {
  await Template.build(template().fromTemplate('js-tools').runCmd(': >/var/calls'), name)
}
await Template.build(template().fromTemplate('mcp-gateway').addMcpServer(['exa', 'brave']), 'js-mcp')
assert.equal(await run(await Sandbox.create('js-mcp'), 'cat /var/calls'), 'mcp-gateway pull exa brave')
const prepare = "printf '#!/bin/sh\\necho $1' >/prepare-exec.sh; chmod 755 /prepare-exec.sh"
const prepared = template().fromTemplate('devcontainer').runCmd(prepare, { user: 'root' })
const inContainer = prepared.betaDevContainerPrebuild('/repo').betaSetDevContainerStart('/repo')
// The SDK starts it with sudo.
if (SUDO) {
  await Template.build(inContainer, 'js-container')
  assert.equal(await run(await Sandbox.create('js-container'), 'cat /devcontainer.sh'), '/repo')
}

const described = template({ fileIgnorePatterns: ['two.txt'] }).fromImage('mine:1').runCmd('true').copy('app', '/app')
assert.equal(JSON.parse(await Template.toJSON(described)).fromImage, 'mine:1')
assert.match(Template.toDockerfile(described), /^FROM mine:1\nRUN true\nCOPY app \/app/)

const all = Sandbox.list()
while (all.hasNext) for (const one of await all.nextItems()) await Sandbox.kill(one.sandboxId)
