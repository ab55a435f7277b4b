// Ask the search worker of a built site: node site_search.js SITE '["question", ...]' prints {question: ["page#heading", ...]},
// best first. The worker sees a scope with the few names of a browser that it uses.
const fs = require("fs"), path = require("path"), vm = require("vm")

const [site, questions] = process.argv.slice(2)
const folder = path.join(site, "assets/javascripts/workers")
const script = fs.readdirSync(folder).find(name => /^search\..*\.js$/.test(name))
const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"))

let listen, answer
const scope = {
  addEventListener: (_, listener) => { listen = listener }, postMessage: message => answer(message),
  importScripts: () => {}, location: {href: "file:///"}, URL, setTimeout, console,
}
scope.self = scope.window = scope
vm.runInNewContext(fs.readFileSync(path.join(folder, script), "utf8"), scope)

const SETUP = 0, QUERY = 2
const ask = (type, data) => new Promise(resolve => { answer = resolve; listen({data: {type, data}}) })
const name = section => section.location.replace(/\.html(#.*)?$/, "") + "#" + section.title.replace(/<[^>]*>/g, "")

async function main() {
  await ask(SETUP, {config: index.config, docs: index.docs, options: {suggest: false}})
  const found = {}
  for (const question of JSON.parse(questions)) {
    const pages = (await ask(QUERY, question)).data.items
    found[question] = pages.flat().sort((a, b) => b.score - a.score).map(name)
  }
  console.log(JSON.stringify(found))
}
main()
