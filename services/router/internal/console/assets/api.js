// What the page asks of the admin API, in Connect's JSON: one POST for a call, a
// stream of length-prefixed messages for decisions. No cookies: the token goes with
// each call, so that no other page can make one.

// Refused says that the token is none, or none any more; one that may not do a thing is
// still good for others.
export class Refused extends Error {}

const admin = '/kinference.admin.v1.AdminService/';
const accounting = '/kinference.accounting.v1.AccountingService/';

export class API {
  constructor(token) { this.token = token; }

  headers(type) {
    return { 'Content-Type': type, 'Connect-Protocol-Version': '1', Authorization: 'Bearer ' + this.token };
  }

  async call(path, message = {}) {
    const r = await fetch(path, { method: 'POST', headers: this.headers('application/json'), body: JSON.stringify(message), cache: 'no-store', credentials: 'omit' });
    const body = await r.json().catch(() => ({}));
    if (r.status === 401) throw new Refused(body.message || 'The token is not good.');
    if (!r.ok) throw new Error(body.message || 'HTTP ' + r.status);
    return body;
  }

  status() { return this.call(admin + 'Status'); }
  catalog() { return this.call(admin + 'GetCatalog'); }
  explain(requestId) { return this.call(admin + 'Explain', { requestId }); }
  usage(message) { return this.call(accounting + 'QueryUsage', message); }
  objectives() { return this.call(accounting + 'Objectives'); }

  // decisions calls each with every decision until the signal aborts or the stream ends.
  async decisions(filter, signal, each) {
    const message = new TextEncoder().encode(JSON.stringify(filter));
    const body = new Uint8Array(5 + message.length);
    new DataView(body.buffer).setUint32(1, message.length);
    body.set(message, 5);
    const r = await fetch(admin + 'WatchDecisions', { method: 'POST', headers: this.headers('application/connect+json'), body, signal, cache: 'no-store', credentials: 'omit' });
    if (r.status === 401) throw new Refused('The token is not good.');
    if (r.status === 403) throw new Error('the token does not allow watching decisions');
    if (!r.ok) throw new Error('HTTP ' + r.status);
    const reader = r.body.getReader();
    let rest = new Uint8Array(0);
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const all = new Uint8Array(rest.length + value.length);
      all.set(rest);
      all.set(value, rest.length);
      let at = 0;
      while (all.length - at >= 5) {
        const length = new DataView(all.buffer, at).getUint32(1);
        if (all.length - at < 5 + length) break;
        const frame = JSON.parse(new TextDecoder().decode(all.subarray(at + 5, at + 5 + length)));
        if (all[at] & 2) { // the last one
          if (frame.error) throw new Error(frame.error.message || frame.error.code);
          return;
        }
        if (frame.decision) each(frame.decision, Number(frame.missed || 0));
        at += 5 + length;
      }
      rest = all.slice(at);
    }
  }
}
