// Search runs in a worker, and browsers refuse workers to pages that are opened as files. Here such a page gets one that
// runs its script in a hidden frame. Pages from a web server keep the browser's own.
if (window.location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = [] // messages from before the script was there
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.appendChild(this.frame)
      const inside = this.frame.contentDocument
      inside.open()
      inside.write("<!doctype html><body></body>")
      inside.close()
      const scope = this.frame.contentWindow
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = inside.createElement("script")
      script.src = new URL(url, document.baseURI).href
      script.onload = () => {
        const messages = this.waiting
        this.waiting = null
        messages.forEach((data) => this.postMessage(data))
      }
      script.onerror = () => this.dispatchEvent(new ErrorEvent("error", { message: `cannot load ${url}` }))
      inside.body.appendChild(script)
    }

    postMessage(data) {
      if (this.waiting) {
        this.waiting.push(data)
      } else {
        const scope = this.frame.contentWindow
        setTimeout(() => scope.dispatchEvent(new MessageEvent("message", { data })))
      }
    }

    terminate() {
      this.frame.remove()
    }
  }
  window.Worker = window.IFrameWorker
}
