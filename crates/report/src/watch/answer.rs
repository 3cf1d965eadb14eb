//! The answers of the server: the page, and the list and report of the chosen runs as server-sent events.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body as _, Frame, Incoming, SizeHint};
use hyper::header::{self, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::access::{Access, Host};
use super::connection::Client;
use super::runs::{ClientState, Runs};
use crate::page::{live, live_policy};

/// How often files are looked at.
const INTERVAL: Duration = Duration::from_secs(1);
/// Looks without news until an event without data is sent, so that a client that is gone is noticed.
const HEARTBEAT: u32 = 15;

/// What is served, and to whom.
pub struct Server {
    access: Access,
    runs: Arc<Runs>,
    page: Bytes,
    policy: String,
}

/// The body of an answer.
pub enum Body {
    /// The whole of it.
    Whole(Bytes),
    /// Events as they come.
    Events(mpsc::Receiver<Bytes>),
}

impl hyper::body::Body for Body {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let data = match self.get_mut() {
            Body::Whole(bytes) => Poll::Ready((!bytes.is_empty()).then(|| std::mem::take(bytes))),
            Body::Events(events) => events.poll_recv(context),
        };
        data.map(|data| data.map(|data| Ok(Frame::data(data))))
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Body::Whole(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Body::Events(_) => SizeHint::default(),
        }
    }
}

impl Server {
    /// A server of these runs.
    pub fn new(access: Access, runs: Arc<Runs>) -> Self {
        Server { access, runs, page: live().into(), policy: live_policy() }
    }
}

/// Answers a request, with the headers that every answer has.
pub fn answer(server: &Server, client: &Client, request: &Request<Incoming>) -> Response<Body> {
    let mut response = route(server, client, request).unwrap_or_else(|(status, reason)| text(status, reason));
    let headers = response.headers_mut();
    let policy = headers.remove(header::CONTENT_SECURITY_POLICY);
    let policy = policy.as_ref().and_then(|policy| policy.to_str().ok()).unwrap_or("default-src 'none'");
    let policy = format!("{policy}; frame-ancestors 'none'");
    headers.insert(header::CONTENT_SECURITY_POLICY, header_value(&policy));
    let always = [
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ];
    headers.extend(always.map(|(name, value)| (name, HeaderValue::from_static(value))));
    response
}

/// The answer to a request, or its refusal.
fn route(
    server: &Server,
    client: &Client,
    request: &Request<Incoming>,
) -> Result<Response<Body>, (StatusCode, &'static str)> {
    let (access, headers) = (&server.access, request.headers());
    if request.method() != Method::GET {
        return Err((StatusCode::METHOD_NOT_ALLOWED, "only GET requests are answered"));
    }
    if !request.body().is_end_stream() {
        return Err((StatusCode::BAD_REQUEST, "the request has a body, and none is read"));
    }
    let host = Host::of(headers).ok_or((StatusCode::BAD_REQUEST, "the request has no valid Host"))?;
    if !access.is_for_us(&host, client.local) {
        let reason =
            "the server is not known by the name in this address; start kintsugi watch with --host NAME";
        return Err((StatusCode::FORBIDDEN, reason));
    }
    let query = request.uri().query().unwrap_or_default();
    let query: Vec<_> = form_urlencoded::parse(query.as_bytes()).collect();
    let by_address = query.iter().any(|(name, value)| name == "token" && access.is_token(value));
    if !by_address && !access.has_cookie(&host, headers) {
        let reason = "the token is missing or wrong; paste the whole address that kintsugi watch printed into the \
                      browser's address bar";
        return Err((StatusCode::FORBIDDEN, reason));
    }
    if !client.admit() {
        return Err((StatusCode::SERVICE_UNAVAILABLE, "there are too many connections"));
    }
    let path = request.uri().path();
    if !["/", "/events"].contains(&path) {
        return Err((StatusCode::NOT_FOUND, "there is no such page"));
    }
    if by_address {
        let rest = query.iter().filter(|(name, _)| name != "token");
        let rest = form_urlencoded::Serializer::new(String::new()).extend_pairs(rest).finish();
        let location = if rest.is_empty() { path.to_owned() } else { format!("{path}?{rest}") };
        let mut redirect = text(StatusCode::SEE_OTHER, "the token is in a cookie now");
        redirect.headers_mut().insert(header::LOCATION, header_value(&location));
        redirect.headers_mut().insert(header::SET_COOKIE, header_value(&access.set_cookie(&host)));
        return Ok(redirect);
    }
    if path == "/" {
        let mut page = whole(StatusCode::OK, "text/html; charset=utf-8", server.page.clone());
        page.headers_mut().insert(header::CONTENT_SECURITY_POLICY, header_value(&server.policy));
        return Ok(page);
    }
    let chosen = query.into_iter().filter(|(name, _)| name == "run").map(|(_, value)| value.into_owned());
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(events(Arc::clone(&server.runs), chosen.collect(), sender));
    Ok(with_kind(Response::new(Body::Events(receiver)), "text/event-stream"))
}

/// Sends the list and the report of the chosen runs whenever they change, until the client leaves.
async fn events(runs: Arc<Runs>, chosen: Vec<String>, client: mpsc::Sender<Bytes>) {
    let chosen: Arc<[String]> = chosen.into();
    let (mut seen, mut quiet) = (ClientState::default(), 0);
    let mut texts = vec!["retry: 2000\n\n".to_owned()];
    loop {
        runs.look().await;
        let (reader, chosen) = (Arc::clone(&runs), Arc::clone(&chosen));
        let Ok(news) = spawn_blocking(move || reader.news(&chosen, seen)).await else { return };
        texts.extend(news.list.map(|data| format!("event: runs\ndata: {data}\n\n")));
        texts.extend(news.report.map(|data| format!("event: report\ndata: {data}\n\n")));
        seen = news.seen;
        quiet = if texts.is_empty() { quiet + 1 } else { 0 };
        if quiet >= HEARTBEAT {
            texts.push(": nothing is new\n\n".to_owned());
            quiet = 0;
        }
        for text in texts.drain(..) {
            if client.send(text.into()).await.is_err() {
                return;
            }
        }
        if timeout(INTERVAL, client.closed()).await.is_ok() {
            return;
        }
    }
}

fn text(status: StatusCode, text: &str) -> Response<Body> {
    whole(status, "text/plain; charset=utf-8", format!("{text}\n").into())
}

fn whole(status: StatusCode, kind: &'static str, body: Bytes) -> Response<Body> {
    let mut response = with_kind(Response::new(Body::Whole(body)), kind);
    *response.status_mut() = status;
    response
}

fn with_kind(mut response: Response<Body>, kind: &'static str) -> Response<Body> {
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

fn header_value(text: &str) -> HeaderValue {
    HeaderValue::from_str(text).expect("it is ASCII without control characters")
}
