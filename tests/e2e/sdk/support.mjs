// What the scripts share.
import assert from 'node:assert/strict'

// Whether a program can get rights by a setuid bit.
export const SUDO = process.env.DORM_E2E_SUDO !== 'no'
const PATIENCE = 60 * Number(process.env.DORM_E2E_SLOWNESS ?? 1)

export async function until(what, condition, seconds = PATIENCE) {
  const end = Date.now() + seconds * 1000
  while (Date.now() < end) {
    const value = await condition()
    if (value) return value
    await new Promise((done) => setTimeout(done, 50))
  }
  assert.fail(`never: ${what}`)
}
