// What clients do to a port of a box besides asking for pages: WebSockets with large messages, HTTP/2 without TLS, trailers.
import assert from 'node:assert/strict'
import { randomBytes } from 'node:crypto'
import { once } from 'node:events'
import http from 'node:http'
import http2 from 'node:http2'

const [url, id, port, key] = process.argv.slice(2)
const routed = { 'e2b-sandbox-id': id, 'e2b-sandbox-port': port, 'x-api-key': key }

// A WebSocket, with messages of every length that is written differently.
const socket = new WebSocket(`${url.replace('http', 'ws')}/socket`, { headers: routed })
socket.binaryType = 'arraybuffer'
await once(socket, 'open')
for (const length of [0, 125, 126, 65535, 65536, 4 << 20]) {
  const sent = randomBytes(length)
  socket.send(sent)
  const [message] = await once(socket, 'message')
  assert.ok(sent.equals(Buffer.from(message.data)), `a message of ${length} bytes came back changed`)
}
socket.close()
await once(socket, 'close')

// HTTP/2 with prior knowledge: many at once on one connection, large bodies both ways, trailers.
// Node refuses answers while more than this many MB of its own requests are still to be sent; 10 unless told.
const session = http2.connect(url, { maxSessionMemory: 64 })
async function over2(method, path, body, more = {}) {
  const stream = session.request({ ':method': method, ':path': path, ...routed, ...more })
  const trailers = new Promise((resolve) => stream.once('trailers', resolve))
  stream.end(body)
  const [head] = await once(stream, 'response')
  const parts = []
  for await (const part of stream) parts.push(part)
  return { status: head[':status'], body: Buffer.concat(parts), trailers }
}
await Promise.all(
  Array.from({ length: 16 }, async () => {
    const body = randomBytes(1 << 20)
    const answer = await over2('POST', '/echo', body, { 'content-length': body.length })
    assert.equal(answer.status, 200)
    assert.ok(answer.body.equals(body), 'a body came back changed')
  }),
)
const second = await over2('GET', '/trailers', undefined, { te: 'trailers' })
assert.equal(second.body.toString(), 'hello')
assert.equal((await second.trailers)['x-sum'], '42')
session.close()

const first = await new Promise((resolve, reject) => {
  http.get(`${url}/trailers`, { headers: { ...routed, te: 'trailers' } }, resolve).on('error', reject)
})
first.resume()
await once(first, 'end')
assert.equal(first.trailers['x-sum'], '42')
