// The connection to the gateway: one stream of states while somebody looks, and single questions.

const TOKEN = "kvatlas-token";
const RETRY_MS = [500, 1000, 2000, 5000, 10000];
const HIDDEN_MS = 10000; // a tab that nobody sees keeps no stream for longer

let token = "";
try { token = sessionStorage.getItem(TOKEN) ?? ""; } catch { /* then it lives as long as the page */ }

/** Show this token from now on; "" forgets it. */
export function keep(shown) {
  token = shown;
  try {
    if (shown) sessionStorage.setItem(TOKEN, shown);
    else sessionStorage.removeItem(TOKEN);
  } catch { /* storage may be forbidden */ }
}

export const hasToken = () => token !== "";

/** A page of the gateway; its error as {status, message}. */
export async function ask(path) {
  const answer = await fetch(path, { headers: headers(), cache: "no-store" });
  const body = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(body?.error?.message ?? answer.statusText), { status: answer.status });
  return body;
}

function headers() {
  return token ? { "x-kvatlas-admin-token": token } : {};
}

/** Follows the stream. `heard(state)` for each state; `said(kind, text)` for what becomes of the
 * connection: "live", "lost", "refused", "paused". */
export class Live {
  constructor(heard, said) {
    this.heard = heard;
    this.said = said;
    this.wanted = false;
    this.running = null;
    this.tries = 0;
    this.timer = 0;
    document.addEventListener("visibilitychange", () => this.seen());
  }

  /** Begin, or begin again. */
  start() {
    this.wanted = true;
    this.open();
  }

  /** Nobody wants to look now. */
  stop() {
    this.wanted = false;
    this.close();
    this.said("paused", "paused");
  }

  seen() {
    clearTimeout(this.hiding);
    if (document.hidden) this.hiding = setTimeout(() => this.close(), HIDDEN_MS);
    else if (this.wanted && !this.running) this.open();
  }

  close() {
    clearTimeout(this.timer);
    this.running?.abort();
    this.running = null;
  }

  async open() {
    this.close();
    const mine = this.running = new AbortController();
    try {
      const answer = await fetch("page/stream", { headers: headers(), cache: "no-store", signal: mine.signal });
      if (!answer.ok) {
        const told = await answer.json().catch(() => null);
        throw Object.assign(new Error(told?.error?.message ?? answer.statusText), { status: answer.status });
      }
      await this.read(answer.body.getReader());
      throw new Error("the gateway ended the stream");
    } catch (error) {
      if (this.running !== mine) return; // closed by ourselves
      this.running = null;
      if (error.status === 401 || error.status === 403) {
        this.wanted = false;
        this.said("refused", error.message);
        return;
      }
      this.said("lost", error.message);
      this.timer = setTimeout(() => this.open(), RETRY_MS[Math.min(this.tries++, RETRY_MS.length - 1)]);
    }
  }

  async read(reader) {
    const decoder = new TextDecoder();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += decoder.decode(value, { stream: true });
      const events = rest.split("\n\n");
      rest = events.pop();
      const last = events.findLast((event) => event.startsWith("data: "));
      if (last === undefined) continue;
      this.tries = 0;
      this.said("live", "");
      this.heard(JSON.parse(last.slice(6)));
    }
  }
}
