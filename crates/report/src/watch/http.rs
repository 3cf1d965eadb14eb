//! As much of HTTP as two pages need: a GET request, and a response that closes the connection.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;

/// A GET request.
#[derive(Debug, PartialEq, Eq)]
pub struct Request {
    /// The path, without the query.
    pub path: String,
    query: Vec<(String, String)>,
    host: String,
}

/// The longest request that is read, headers included.
const LONGEST: u64 = 32 << 10;

impl Request {
    /// Reads a request; `None` if it is something else.
    pub fn read(stream: impl Read) -> io::Result<Option<Request>> {
        let mut lines = BufReader::new(stream.take(LONGEST)).lines();
        let Some(first) = lines.next().transpose()? else { return Ok(None) };
        let mut words = first.split(' ');
        let (Some("GET"), Some(target), Some(version)) = (words.next(), words.next(), words.next()) else {
            return Ok(None);
        };
        if !version.starts_with("HTTP/1.") {
            return Ok(None);
        }
        let mut host = String::new();
        for line in lines {
            let line = line?;
            match line.split_once(':') {
                _ if line.is_empty() => {
                    let (path, query) = target.split_once('?').unwrap_or((target, ""));
                    return Ok(Some(Request { path: path.to_owned(), query: parse(query), host }));
                }
                Some((name, value)) if name.eq_ignore_ascii_case("host") => {
                    value.trim().clone_into(&mut host);
                }
                Some(_) => {}
                None => return Ok(None),
            }
        }
        Ok(None)
    }

    /// All values of a name in the query.
    pub fn values(&self, name: &str) -> Vec<String> {
        self.query.iter().filter(|(known, _)| known == name).map(|(_, value)| value.clone()).collect()
    }

    /// Whether the query has the token. The time that this takes does not depend on how much of it is right.
    pub fn has_token(&self, token: &str) -> bool {
        let same = |given: &String| {
            let differ = given.bytes().zip(token.bytes()).fold(0, |differ, (a, b)| differ | (a ^ b));
            given.len() == token.len() && differ == 0
        };
        self.values("token").iter().any(same)
    }

    /// Whether it was sent to this machine under its own name.
    pub fn is_for_loopback(&self, port: u16) -> bool {
        let name = self.host.strip_suffix(&format!(":{port}")).unwrap_or(&self.host);
        ["localhost", "127.0.0.1", "[::1]"].contains(&name)
    }
}

/// Names and values of a query.
fn parse(query: &str) -> Vec<(String, String)> {
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
        .map(|(a, b)| (decode(a), decode(b)))
        .collect()
}

/// Text without its `%20` and `+`.
fn decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let code = match tail {
            [a, b, ..] if *first == b'%' => {
                std::str::from_utf8(&[*a, *b]).ok().and_then(|digits| u8::from_str_radix(digits, 16).ok())
            }
            _ => None,
        };
        bytes.push(code.unwrap_or(if *first == b'+' { b' ' } else { *first }));
        rest = if code.is_some() { &tail[2..] } else { tail };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Sends a whole response.
pub fn respond(mut stream: &TcpStream, status: &str, kind: &str, body: &str) -> io::Result<()> {
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nCache-Control: no-store\r\n\
         X-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\nX-Frame-Options: DENY\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())?;
    stream.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Option<Request> {
        Request::read(text.as_bytes()).expect("a slice can be read")
    }

    #[test]
    fn a_request_has_a_path_a_query_and_a_host() {
        let request = read(
            "GET /events?run=a%2Fb&run=c+d&token=abc HTTP/1.1\r\nAccept: */*\r\nhost: localhost:80\r\n\r\n",
        );
        let request = request.expect("a request");
        assert_eq!(
            (request.path.as_str(), request.values("run")),
            ("/events", vec!["a/b".to_owned(), "c d".to_owned()])
        );
        assert!(request.has_token("abc") && !request.has_token("abd") && !request.has_token("abcd"));
        assert!(request.is_for_loopback(80) && request.is_for_loopback(81) == (request.host == "localhost"));
    }

    #[test]
    fn whatever_else_comes_is_none() {
        for text in [
            "",
            "GET",
            "POST / HTTP/1.1\r\n\r\n",
            "GET / HTTP/1.1\r\nHost",
            "GET / SMTP\r\n\r\n",
            "GET / HTTP/1.1\r\nno header\r\n\r\n",
        ] {
            assert_eq!(read(text), None, "{text}");
        }
        assert_eq!(read(&format!("GET / HTTP/1.1\r\nLong: {}\r\n\r\n", "a".repeat(40_000))), None);
        assert_eq!(decode("%zz%4"), "%zz%4");
        let elsewhere = read("GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n").expect("a request");
        assert!(!elsewhere.is_for_loopback(80));
    }
}
