//! The live page: served to this machine, or to those that have the token.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use crate::support::{command, folder, kintsugi, stdout, tiny};

/// A server that ends with the test.
struct Server {
    process: Child,
    port: u16,
    token: String,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

impl Server {
    fn start(folder: &Path, arguments: &[&str]) -> Self {
        let arguments = [&["watch", "--port", "0"], arguments].concat();
        let mut process = command(folder, &arguments).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim_end().rsplit_once("://").unwrap_or_else(|| panic!("{line}")).1.to_owned();
        let (host, path) = address.split_once('/').unwrap();
        let port = host.rsplit_once(':').unwrap().1.parse().unwrap();
        Server { process, port, token: path.trim_start_matches("?token=").to_owned() }
    }

    fn send(&self, target: &str, host: &str) -> TcpStream {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream.write_all(format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes()).unwrap();
        stream
    }

    /// The whole answer to a request.
    fn get(&self, target: &str, host: &str) -> String {
        let mut text = String::new();
        self.send(target, host).read_to_string(&mut text).unwrap();
        text
    }

    /// The data of the first event of each name.
    fn events(&self, target: &str, names: &[&str]) -> Vec<serde_json::Value> {
        let mut lines =
            BufReader::new(self.send(target, "localhost")).lines().map(|line| line.expect("a line"));
        let mut next = |name: &&str| {
            lines.find(|line| *line == format!("event: {name}")).expect("an event");
            let data = lines.next().expect("its data");
            serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON")
        };
        names.iter().map(&mut next).collect()
    }
}

#[test]
fn runs_of_a_folder_are_listed_and_shown_as_they_grow() {
    let folder = folder("watch-runs");
    stdout(&tiny(&folder, &["train"], &["run.out=runs/a", "run.steps=2"]));
    stdout(&tiny(&folder, &["train"], &["run.out=runs/deep/<b>", "run.steps=3"]));
    let server = Server::start(&folder, &["runs"]);
    let page = server.get("/", &format!("localhost:{}", server.port));
    assert!(page.starts_with("HTTP/1.1 200 OK\r\n") && page.contains("data-live"), "{}", &page[..200]);
    let found = server.events("/events?run=deep%2F%3Cb%3E", &["runs", "report"]);
    let names: Vec<_> =
        found[0].as_array().unwrap().iter().map(|run| run["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["a", "deep/<b>"]);
    assert_eq!(found[0][0]["state"], "finished");
    assert_eq!(found[1]["title"], "Run deep/<b>");
    // A line in the making is not shown, and a whole one is.
    let metrics = folder.join("runs/a/metrics.jsonl");
    let add =
        |text: &str| fs::OpenOptions::new().append(true).open(&metrics).unwrap().write_all(text.as_bytes());
    add("{\"step\":3,\"loss\":1.25").unwrap();
    let list = |server: &Server| server.events("/events", &["runs"]).remove(0);
    assert_eq!(list(&server)[0]["step"], 2.0);
    add("}\n").unwrap();
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(
        (list(&server)[0]["step"].clone(), list(&server)[0]["loss"].clone()),
        (3.0.into(), 1.25.into())
    );
    assert!(server.get("/other", "localhost").starts_with("HTTP/1.1 404"));
}

#[test]
fn strangers_are_refused() {
    let folder = folder("watch-strangers");
    let server = Server::start(&folder, &["."]);
    assert!(server.token.is_empty());
    assert!(server.get("/", "127.0.0.1").starts_with("HTTP/1.1 200"));
    assert!(server.get("/", "evil.example").starts_with("HTTP/1.1 403"), "a name that leads here");
    let server = Server::start(&folder, &[".", "--address", "0.0.0.0"]);
    assert_eq!(server.token.len(), 32);
    let wrong = "0".repeat(32);
    for (target, status) in
        [("/".to_owned(), 403), (format!("/?token={wrong}"), 403), (format!("/?token={}", server.token), 200)]
    {
        let answer = server.get(&target, "evil.example");
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{target}: {answer}");
    }
    assert!(server.get("/events?token=", "localhost").starts_with("HTTP/1.1 403"));
    let mut stream = TcpStream::connect(("127.0.0.1", server.port)).unwrap();
    stream.write_all(b"\xff\xfe\r\n\r\n").unwrap();
    let mut said = Vec::new();
    stream.read_to_end(&mut said).ok();
    assert!(server.get("/", "localhost").starts_with("HTTP/1.1 403"), "it serves on");
}

#[test]
fn what_cannot_be_watched_is_a_mistake() {
    let folder = folder("watch-mistakes");
    let output = kintsugi(&folder, &["watch", "missing"]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "error: missing is no folder\n");
}
