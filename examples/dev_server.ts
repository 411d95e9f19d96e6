// A dev server whose preview wakes it. See dev_server.py, which does the same with a server of its own making.
import assert from 'node:assert/strict'
import { setTimeout as sleep } from 'node:timers/promises'
import { Sandbox } from 'e2b'

const port = 5173
const server = `
import http.server, os
secret = os.urandom(8).hex()  # in memory alone
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = f"{open('page.html').read()} by {secret}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("127.0.0.1", ${port}), Page).serve_forever()
`

const box = await Sandbox.create({ timeoutMs: 600_000, lifecycle: { onTimeout: 'pause', autoResume: true } })
console.log(`${box.sandboxId} is made; its preview is http://${box.getHost(port)}`)

/** The page, as somebody sees it who opens the preview. A browser would open the URL itself. */
async function preview(): Promise<string> {
  const headers = { 'E2b-Sandbox-Id': box.sandboxId, 'E2b-Sandbox-Port': String(port) }
  for (let tries = 0; tries < 300; tries++) {
    const page = await fetch(process.env.E2B_SANDBOX_URL!, { headers })
    const text = await page.text()
    if (page.ok) return text
    await sleep(100)
  }
  throw new Error('the server never listened')
}

try {
  await box.files.write('/home/user/server.py', server)
  await box.files.write('/home/user/page.html', 'made')
  await box.commands.run('exec python3 server.py', { background: true, timeoutMs: 0 })
  const [, secret] = (await preview()).split(' by ')
  console.log(`the server is up, and its secret is ${secret}`)

  await box.pause()
  console.log('the sandbox sleeps')
  const woken = await preview()
  console.log(`opening the page wakes it: ${woken}`)
  assert.equal(woken, `made by ${secret}`)

  await box.files.write('/home/user/page.html', 'edited')
  const edited = await preview()
  console.log(`after an edit: ${edited}`)
  assert.equal(edited, `edited by ${secret}`)
} finally {
  await box.kill()
}
