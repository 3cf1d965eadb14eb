//! The live page: served to those that have the token, under the server's own names, and without following links.

use std::fs;
use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::Duration;

use serde_json::Value;

use crate::support::{command, folder, kintsugi, stdout, tiny};

/// A server that ends with the test.
struct Server {
    process: Child,
    /// The host of the printed address.
    host: String,
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
        let address = line.trim_end().rsplit_once("://").unwrap_or_else(|| panic!("{line}")).1;
        let (place, token) = address.split_once("/?token=").unwrap_or_else(|| panic!("{line}"));
        let (host, port) = place.rsplit_once(':').unwrap();
        Server { process, host: host.to_owned(), port: port.parse().unwrap(), token: token.to_owned() }
    }

    fn connect(&self) -> TcpStream {
        let host = if self.host.starts_with("127.") { &self.host } else { "127.0.0.1" };
        let stream = TcpStream::connect((host, self.port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    /// Sends a request with these lines of headers.
    fn send(&self, target: &str, headers: &[String]) -> TcpStream {
        let mut stream = self.connect();
        let headers = headers.join("\r\n");
        stream.write_all(format!("GET {target} HTTP/1.1\r\n{headers}\r\n\r\n").as_bytes()).unwrap();
        stream
    }

    /// The headers of a browser that has the cookie.
    fn known(&self) -> [String; 2] {
        [
            format!("Host: {}:{}", self.host, self.port),
            format!("Cookie: kintsugi-{}={}", self.port, self.token),
        ]
    }

    /// The whole answer to a request.
    fn answer(&self, target: &str, headers: &[String]) -> String {
        let mut text = String::new();
        self.send(target, headers).read_to_string(&mut text).unwrap();
        text
    }

    /// The status of the answer to a request.
    fn status(&self, target: &str, headers: &[String]) -> u16 {
        status_of(self.send(target, headers))
    }

    fn events(&self, target: &str) -> Events {
        Events(BufReader::new(self.send(target, &self.known())).lines())
    }

    /// The first report of some runs for which no plan is being predicted any more.
    fn report(&self, target: &str) -> Value {
        let mut events = self.events(target);
        loop {
            let report = events.next("report");
            if !is_pending(&report) {
                return report;
            }
        }
    }
}

fn status_of(stream: TcpStream) -> u16 {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    line.split(' ').nth(1).unwrap_or_else(|| panic!("{line:?}")).parse().unwrap()
}

/// A stream of events.
struct Events(Lines<BufReader<TcpStream>>);

impl Events {
    /// The data of the next event of a name.
    fn next(&mut self, name: &str) -> Value {
        let mut lines = self.0.by_ref().map(|line| line.expect("a line"));
        lines.find(|line| *line == format!("event: {name}")).expect("an event");
        let data = lines.next().expect("its data");
        serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON")
    }
}

fn is_pending(report: &Value) -> bool {
    report["notes"].to_string().contains("is being predicted")
}

/// A run of one step, as files.
fn write_run(folder: &Path, config: &str) {
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("metrics.jsonl"), "{\"step\":1,\"loss\":3.5}\n").unwrap();
    fs::write(folder.join("config.toml"), config).unwrap();
}

const CONFIG: &str = "model.preset = \"demo\"\n[batch]\nsequence = 64\nmicro = 1\nglobal = 4\n";

#[test]
fn runs_of_a_folder_are_listed_and_shown_as_they_grow() {
    let folder = folder("watch-runs");
    stdout(&tiny(&folder, &["train"], &["run.out=runs/a", "run.steps=2"]));
    stdout(&tiny(&folder, &["train"], &["run.out=runs/deep/<b>", "run.steps=3"]));
    let server = Server::start(&folder, &["runs"]);
    let page = server.answer("/", &server.known());
    assert!(page.starts_with("HTTP/1.1 200 OK\r\n") && page.contains("data-live"), "{}", &page[..200]);
    let mut events = server.events("/events?run=deep%2F%3Cb%3E");
    let list = events.next("runs");
    let names: Vec<_> = list.as_array().unwrap().iter().map(|run| run["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["a", "deep/<b>"]);
    assert_eq!(list[0]["state"], "finished");
    assert_eq!(events.next("report")["title"], "Run deep/<b>");
    let report = server.report("/events?run=a&run=a&run=missing");
    assert_eq!(report["title"], "Run a", "each run once");
    let overview = &report["sections"][0]["items"][0]["rows"];
    assert_eq!(overview[0][0], "model", "facts of the plan come with its prediction: {overview}");
    // A line in the making is not shown, and a whole one is.
    let metrics = folder.join("runs/a/metrics.jsonl");
    let add =
        |text: &str| fs::OpenOptions::new().append(true).open(&metrics).unwrap().write_all(text.as_bytes());
    add("{\"step\":3,\"loss\":1.25").unwrap();
    let mut events = server.events("/events");
    assert_eq!(events.next("runs")[0]["step"], 2.0);
    add("}\n").unwrap();
    let list = events.next("runs");
    assert_eq!((list[0]["step"].clone(), list[0]["loss"].clone()), (3.0.into(), 1.25.into()));
    assert_eq!(server.status("/other", &server.known()), 404);
}

#[test]
fn the_token_is_needed_on_this_machine_too() {
    let folder = folder("watch-token");
    let server = Server::start(&folder, &["."]);
    assert_eq!(server.token.len(), 32);
    let (wrong, token, port) = ("0".repeat(32), &server.token, server.port);
    let [host, cookie] = server.known();
    let alone = [host.clone()];
    for target in
        ["/", "/events", "/events?token=", &format!("/?token={wrong}"), &format!("/?token={}", &token[1..])]
    {
        assert_eq!(server.status(target, &alone), 403, "{target}");
    }
    for cookie in
        [format!("kintsugi-{port}={wrong}"), format!("kintsugi-1={token}"), format!("token={token}")]
    {
        assert_eq!(server.status("/", &[host.clone(), format!("Cookie: {cookie}")]), 403, "{cookie}");
    }
    let answer = server.answer(&format!("/?a=%20b&token={token}&c"), &alone);
    assert!(answer.starts_with("HTTP/1.1 303"), "{answer}");
    let lines: Vec<&str> = answer.lines().collect();
    assert!(lines.contains(&"location: /?a=+b&c="), "{answer}");
    let expected = format!("set-cookie: kintsugi-{port}={token}; Path=/; HttpOnly; SameSite=Strict");
    assert!(lines.contains(&expected.as_str()), "{answer}");
    assert_eq!(
        server.status("/", &[host.clone(), format!("Cookie: a=b; {}", &cookie["Cookie: ".len()..])]),
        200
    );
    assert_eq!(server.status(&format!("//evil.example?token={token}"), &alone), 404, "no way to elsewhere");
    // A request that is none ends alone.
    let mut stream = server.connect();
    stream.write_all(b"\xff\xfe\r\n\r\n").unwrap();
    stream.read_to_end(&mut Vec::new()).ok();
    assert_eq!(server.status("/", &server.known()), 200);
    let other = Server::start(&folder, &["."]);
    assert_ne!(other.token, server.token);
}

#[test]
fn only_the_servers_own_names_are_answered() {
    let folder = folder("watch-host");
    let with = |server: &Server, host: &str| {
        let port = host.rsplit_once(':').map_or("80", |(_, port)| port);
        [format!("Host: {host}"), format!("Cookie: kintsugi-{port}={}", server.token)]
    };
    // Another port is that of a tunnel.
    let server = Server::start(&folder, &["."]);
    for host in ["localhost:9999", "LOCALHOST", "127.0.0.1:8080", "127.9.9.9:8080", "[::1]:8080"] {
        assert_eq!(server.status("/", &with(&server, host)), 200, "{host}");
    }
    for host in ["evil.example:8080", "localhost.evil.example", "10.0.0.1:8080"] {
        assert_eq!(server.status("/", &with(&server, host)), 403, "{host}");
    }
    assert_eq!(server.status("/", &with(&server, "a@localhost")), 400);
    let [host, cookie] = server.known();
    assert_eq!(server.status("/", std::slice::from_ref(&cookie)), 400, "no host");
    assert_eq!(server.status("/", &[host.clone(), host, cookie]), 400, "two hosts");
    let server = Server::start(&folder, &[".", "--address", "0.0.0.0"]);
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    assert_eq!(server.host, name.trim(), "the address that is printed");
    assert_eq!(server.status("/", &server.known()), 200);
    assert_eq!(server.status("/", &with(&server, "localhost:80")), 200);
    assert_eq!(server.status("/", &with(&server, "evil.example")), 403);
    let server = Server::start(&folder, &[".", "--address", "0.0.0.0", "--host", "Node7.example.org"]);
    assert_eq!(server.host, "Node7.example.org");
    assert_eq!(server.status("/", &with(&server, "node7.example.org")), 200);
    let output = kintsugi(&folder, &["watch", ".", "--host", "http://node7"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("without http://"));
}

#[test]
fn another_loopback_address_is_printed_as_one_that_is_answered() {
    let folder = folder("watch-loopback");
    let server = Server::start(&folder, &[".", "--address", "127.0.0.2"]);
    assert_eq!(server.host, "127.0.0.2");
    let host = format!("Host: 127.0.0.2:{}", server.port);
    assert_eq!(server.status(&format!("/?token={}", server.token), &[host]), 303);
    assert_eq!(server.status("/", &server.known()), 200);
}

#[test]
fn every_answer_has_the_headers_that_protect_it() {
    let folder = folder("watch-headers");
    let server = Server::start(&folder, &["."]);
    let known = server.known();
    let head = |stream: TcpStream| {
        let lines = BufReader::new(stream).lines().map(|line| line.unwrap().to_ascii_lowercase());
        lines.take_while(|line| !line.is_empty()).collect::<Vec<String>>()
    };
    let mut post = server.connect();
    post.write_all(format!("POST / HTTP/1.1\r\n{}\r\n{}\r\n\r\n", known[0], known[1]).as_bytes()).unwrap();
    let body = [&known[..], &["Content-Length: 5".to_owned()]].concat();
    let answers = [
        (200, server.send("/", &known)),
        (200, server.send("/events", &known)),
        (303, server.send(&format!("/?token={}", server.token), &known)),
        (400, server.send("/", &body)),
        (403, server.send("/", &known[..1])),
        (403, server.send("/", &["Host: evil.example".to_owned()])),
        (404, server.send("/none", &known)),
        (405, post),
    ];
    for (status, stream) in answers {
        let head = head(stream);
        assert!(head[0].starts_with(&format!("http/1.1 {status}")), "{head:?}");
        for line in [
            "referrer-policy: no-referrer",
            "x-content-type-options: nosniff",
            "x-frame-options: deny",
            "cache-control: no-store",
        ] {
            assert!(head.iter().any(|known| known == line), "{status}, {line}: {head:?}");
        }
        let policy = head.iter().find_map(|line| line.strip_prefix("content-security-policy: "));
        let policy = policy.unwrap_or_else(|| panic!("{status}: {head:?}"));
        assert!(
            policy.starts_with("default-src 'none'") && policy.ends_with("frame-ancestors 'none'"),
            "{policy}"
        );
    }
}

#[test]
fn links_are_not_followed() {
    let folder = folder("watch-links");
    let secret = "model.preset = \"demo\" # secret\n";
    write_run(&folder.join("elsewhere/run"), secret);
    fs::write(folder.join("secret.json"), "{\"failure\":\"secret\"}").unwrap();
    write_run(&folder.join("runs/a"), CONFIG);
    fs::remove_file(folder.join("runs/a/config.toml")).unwrap();
    symlink("../../elsewhere/run/config.toml", folder.join("runs/a/config.toml")).unwrap();
    symlink("../../secret.json", folder.join("runs/a/summary.json")).unwrap();
    symlink("../elsewhere/run", folder.join("runs/b")).unwrap();
    symlink("../elsewhere", folder.join("runs/c")).unwrap();
    fs::create_dir(folder.join("runs/d")).unwrap();
    symlink("../../elsewhere/run/metrics.jsonl", folder.join("runs/d/metrics.jsonl")).unwrap();
    let server = Server::start(&folder, &["runs"]);
    let list = server.events("/events").next("runs");
    assert_eq!(list.as_array().unwrap().len(), 1, "{list}");
    assert_eq!((&list[0]["name"], &list[0]["state"]), (&"a".into(), &"running".into()));
    let report = server.report("/events?run=a&run=b&run=c%2Frun&run=d");
    assert_eq!(report["title"], "Run a");
    assert!(!report.to_string().contains("secret"), "{report}");
    assert!(report["notes"].to_string().contains("config.toml of a is not a configuration"), "{report}");
    // The folder that the user names may be a link.
    symlink("runs", folder.join("latest")).unwrap();
    let server = Server::start(&folder, &["latest"]);
    assert_eq!(server.events("/events").next("runs"), list);
}

#[test]
fn only_a_configuration_is_shown_as_one() {
    let folder = folder("watch-config");
    let written = [
        ("a", "root:secret:0:0\n".to_owned(), false),
        ("b", "password = \"secret\"\n".to_owned(), false),
        ("c", format!("{CONFIG}# secret\n"), true),
        ("d", format!("{CONFIG}# secret{}\n", "-".repeat(1 << 20)), false),
        ("e", format!("{CONFIG}# secret\n[parallel]\ntp = 1000\n"), true),
    ];
    for (name, config, _) in &written {
        write_run(&folder.join(name), config);
    }
    let server = Server::start(&folder, &["."]);
    for (name, _, shown) in written {
        let report = server.report(&format!("/events?run={name}"));
        assert_eq!(report.to_string().contains("secret"), shown, "{name}: {report}");
        let refused = report["notes"].to_string().contains("is not a configuration");
        assert_eq!(refused, !shown, "{name}: {report}");
    }
}

#[test]
fn half_requests_do_not_shut_others_out() {
    let folder = folder("watch-half");
    let server = Server::start(&folder, &["."]);
    let half = || {
        let mut stream = server.connect();
        stream.write_all(b"GET / HTTP/1.1\r\nHost: local").unwrap();
        stream
    };
    let _open: Vec<TcpStream> = (0..100).map(|_| half()).collect();
    assert_eq!(server.status("/", &server.known()), 200);
    // A client that goes on sending does not get more time.
    let mut slow = half();
    slow.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let ended = (0..300).any(|_| {
        let sent = slow.write_all(b"h");
        let waits = |error: &std::io::Error| error.kind() == std::io::ErrorKind::WouldBlock;
        sent.is_err() || !slow.read(&mut [0; 1]).is_err_and(|error| waits(&error))
    });
    assert!(ended, "after 300 bytes the server still waits for the rest");
    // Clients with the token are limited, too.
    let streams: Vec<TcpStream> = (0..64)
        .map(|_| {
            let mut stream = server.send("/events", &server.known());
            let mut status = [0; 12];
            stream.read_exact(&mut status).unwrap();
            assert_eq!(&status, b"HTTP/1.1 200");
            stream
        })
        .collect();
    assert_eq!(server.status("/", &server.known()), 503);
    drop(streams);
    while server.status("/", &server.known()) != 200 {
        sleep(Duration::from_millis(100));
    }
}

#[test]
fn a_client_that_stops_reading_is_ended() {
    let folder = folder("watch-slow");
    let names: Vec<String> = (0..8).map(|i| i.to_string()).collect();
    for name in &names {
        write_run(&folder.join(name), &format!("{CONFIG}# {}\n", "-".repeat(1_000_000)));
    }
    let server = Server::start(&folder, &["."]);
    let sockets = || {
        let open = fs::read_dir(format!("/proc/{}/fd", server.process.id())).unwrap();
        let links = open.filter_map(|entry| fs::read_link(entry.unwrap().path()).ok());
        links.filter(|link| link.to_string_lossy().starts_with("socket:")).count()
    };
    let listening = sockets();
    let runs: Vec<String> = names.iter().map(|name| format!("run={name}")).collect();
    // More is sent than the buffers of both sockets take.
    let stream = server.send(&format!("/events?{}", runs.join("&")), &server.known());
    stream.peek(&mut [0; 1]).unwrap();
    for _ in 0..600 {
        if sockets() == listening {
            return;
        }
        sleep(Duration::from_millis(100));
    }
    panic!("after a minute the server still waits for the client");
}

#[test]
fn a_large_plan_is_predicted_while_pages_are_shown() {
    let folder = folder("watch-predict");
    // It takes a hundred times as long as the small one.
    let large = "model = { preset = \"gpt-175b\", layers = 1024 }\ncluster.preset = \"h100\"\n\
                 batch = { sequence = 2048, micro = 1, global = 1536 }\nmemory.recompute = \"full\"\n\
                 parallel = { tp = 32, pp = 512, dp = 1, schedule = \"interleaved\", virtual_stages = 2 }\n";
    write_run(&folder.join("large"), large);
    write_run(&folder.join("small"), CONFIG);
    let server = Server::start(&folder, &["."]);
    let large = || server.events("/events?run=large").next("report");
    assert!(is_pending(&large()), "the page comes before the prediction");
    let rows = |report: &Value| report["sections"][0]["items"][0]["rows"].to_string();
    let small = server.report("/events?run=small");
    assert!(rows(&small).contains("model"), "it is predicted: {small}");
    let large = large();
    assert!(is_pending(&large), "the small plan does not wait for the large one");
    assert!(!rows(&large).contains("model"), "{large}");
}

#[test]
fn what_cannot_be_watched_is_a_mistake() {
    let folder = folder("watch-mistakes");
    let output = kintsugi(&folder, &["watch", "missing"]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "error: missing is not a folder\n");
}
