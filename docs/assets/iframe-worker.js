// The search runs in a Worker, which browsers refuse to a page that is opened from a folder: there, run its script in a frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.scope = frame.contentWindow
      this.scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}))
      const script = this.scope.document.createElement("script")
      script.src = new URL(url, location)
      this.loaded = new Promise(resolve => { script.onload = resolve })
      this.scope.document.body.append(script)
    }
    postMessage(data) {
      this.loaded.then(() => this.scope.dispatchEvent(new this.scope.MessageEvent("message", {data})))
    }
  }
}
