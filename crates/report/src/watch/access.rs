//! Who may see the pages: browsers that have the token and that reach the server under a name of its own.
//!
//! The token comes once in the address, and then in a cookie. The name is checked because a page of another site can have its
//! own name resolved to this server's address; its scripts would then be of the same origin as the pages of the runs.

use std::fs::File;
use std::io::{self, Read};
use std::net::IpAddr;

use hyper::HeaderMap;
use hyper::header::{COOKIE, HOST};
use hyper::http::uri::Authority;

/// The token and the names of a server.
pub struct Access {
    token: String,
    names: Vec<String>,
}

/// The name and the port that a browser knows the server by.
pub struct Host {
    name: String,
    port: u16,
}

/// Sixteen random bytes, as text.
pub fn new_token() -> io::Result<String> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(format!("{:032x}", u128::from_le_bytes(bytes)))
}

impl Host {
    /// The host that a request is for; `None` unless it names exactly one.
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let mut values = headers.get_all(HOST).iter();
        let (Some(value), None) = (values.next(), values.next()) else { return None };
        let text = value.to_str().ok().filter(|text| !text.contains('@'))?;
        let authority: Authority = text.parse().ok()?;
        let port = authority.port_u16().unwrap_or(80);
        Some(Host { name: without_brackets(authority.host()).to_ascii_lowercase(), port })
    }

    /// The name of the cookie. A cookie is for all ports of a host, and behind a tunnel the browser's port is another one
    /// than the server's.
    fn cookie(&self) -> String {
        format!("kintsugi-{}", self.port)
    }
}

impl Access {
    /// Access by this token, under these names beside those of this machine for itself.
    pub fn new(token: String, names: &[String]) -> Self {
        let names = names.iter().map(|name| without_brackets(name).to_ascii_lowercase()).collect();
        Access { token, names }
    }

    /// Whether the host is this server: its address `local`, one of its names, or a name of the browser's own machine, as
    /// at the end of a tunnel.
    pub fn is_for_us(&self, host: &Host, local: IpAddr) -> bool {
        let by_address = host.name.parse::<IpAddr>().is_ok_and(|address| {
            let address = address.to_canonical();
            address.is_loopback() || address == local.to_canonical()
        });
        by_address || host.name == "localhost" || self.names.contains(&host.name)
    }

    /// Whether a text is the token. The time that this takes does not depend on how much of it is right.
    pub fn is_token(&self, given: &str) -> bool {
        let differ = given.bytes().zip(self.token.bytes()).fold(0, |differ, (a, b)| differ | (a ^ b));
        given.len() == self.token.len() && differ == 0
    }

    /// Whether a request has the cookie that [`set_cookie`](Self::set_cookie) sets.
    pub fn has_cookie(&self, host: &Host, headers: &HeaderMap) -> bool {
        let name = host.cookie();
        let texts = headers.get_all(COOKIE).iter().filter_map(|value| value.to_str().ok());
        let mut cookies = texts.flat_map(|text| text.split(';')).filter_map(|cookie| cookie.split_once('='));
        cookies.any(|(known, value)| known.trim() == name && self.is_token(value.trim()))
    }

    /// The value of the header that sets the cookie.
    pub fn set_cookie(&self, host: &Host) -> String {
        format!("{}={}; Path=/; HttpOnly; SameSite=Strict", host.cookie(), self.token)
    }
}

/// An address of IPv6 without the brackets that it has in a URL.
fn without_brackets(name: &str) -> &str {
    name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn host(text: &'static str) -> Option<Host> {
        let mut headers = HeaderMap::new();
        headers.insert(HOST, text.parse().expect("a value"));
        Host::of(&headers)
    }

    #[test]
    fn only_names_of_the_server_are_accepted() {
        let access = Access::new("secret".to_owned(), &["Node7".to_owned(), "[fd00::1]".to_owned()]);
        let local = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 5));
        let accepted = |text| host(text).is_some_and(|host| access.is_for_us(&host, local));
        for text in ["localhost:9999", "127.0.0.2:1", "[::1]:8080", "10.0.0.5:8080", "node7", "[fd00::1]:80"]
        {
            assert!(accepted(text), "{text}");
        }
        for text in
            ["evil.example", "10.0.0.6:8080", "localhost.evil.example", "a@localhost", "node7.evil:8080", ""]
        {
            assert!(!accepted(text), "{text}");
        }
    }

    #[test]
    fn the_cookie_is_named_by_the_port_and_must_have_the_whole_token() {
        let access = Access::new("secret".to_owned(), &[]);
        let host = host("localhost:8080").expect("a host");
        let has = |text: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(COOKIE, text.parse().expect("a value"));
            access.has_cookie(&host, &headers)
        };
        assert!(has("kintsugi-8080=secret") && has("a=b; kintsugi-8080=old; kintsugi-8080=secret"));
        for text in ["kintsugi-8081=secret", "kintsugi-8080=secre", "kintsugi-8080=secrets", "secret"] {
            assert!(!has(text), "{text}");
        }
    }
}
