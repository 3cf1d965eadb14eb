//! NCCL or RCCL, loaded at run time: the functions that this transport calls. Both have the same interface.

use std::env;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;

use kintsugi_tensor::DType;
use libloading::Library;

/// The environment variable that names the library.
pub const VARIABLE: &str = "KINTSUGI_NCCL";

/// The names that are tried, in order.
const NAMES: [&str; 4] = ["libnccl.so.2", "libnccl.so", "librccl.so.1", "librccl.so"];

/// The first version that accepts several ranks on one GPU.
pub const SHARED_GPU_VERSION: Version = Version { major: 2, minor: 29, patch: 0 };

/// Why there is no NCCL.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// No library was found.
    #[error(
        "no NCCL library was found (tried {}); install one (Debian and Ubuntu: apt-get install libnccl2, or pip install \
         nvidia-nccl-cu13), or name yours with {VARIABLE}=/path/to/libnccl.so.2",
        NAMES.join(", ")
    )]
    Missing,
    /// The library that the user named cannot be loaded.
    #[error("{VARIABLE}={name} cannot be loaded: {reason}")]
    Named {
        /// The name.
        name: String,
        /// The loader's message.
        reason: String,
    },
    /// A library lacks a function.
    #[error("{name} has no {symbol}; NCCL 2.18 or newer is needed")]
    Incomplete {
        /// The library.
        name: String,
        /// The missing function.
        symbol: &'static str,
    },
}

/// An error of an NCCL call: what was called, and the library's words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed: {message}")]
pub struct NcclError {
    /// The function.
    pub call: &'static str,
    /// The library's message.
    pub message: String,
}

/// A version of NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    major: u32,
    minor: u32,
    patch: u32,
}

impl Version {
    /// From the library's number: 2.8.3 and older count the minor version in hundreds, newer ones the major one in ten
    /// thousands.
    fn of(code: c_int) -> Self {
        let code = code.max(0) as u32;
        let large = if code < 10_000 { 1000 } else { 10_000 };
        Version { major: code / large, minor: code % large / 100, patch: code % 100 }
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// What the ranks of a communicator find each other by.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId(pub [u8; UniqueId::BYTES]);

impl UniqueId {
    pub const BYTES: usize = 128;
}

/// A communicator of the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Handle(*mut c_void);

// SAFETY: a handle is a pointer that the library alone follows. Whoever calls the library with it says why no other thread
// does.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

/// The options of a communicator (`ncclConfig_t`, up to the fields of NCCL 2.18). The library reads as many bytes as `size` says
/// and has defaults for the rest. The last field was padding before it had a name.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
}

impl Config {
    /// A field that has the library's default.
    const UNDEFINED: c_int = c_int::MIN;

    /// Communicators with this many channels, each with resources of its own: NCCL runs communicators that share resources one
    /// after the other, in the order in which the host enqueues them, and with that order two ranks can wait for each other.
    fn new(channels: u32) -> Self {
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 21_800,
            blocking: 1,
            cga_cluster_size: Config::UNDEFINED,
            min_ctas: channels as c_int,
            max_ctas: channels as c_int,
            net_name: ptr::null(),
            split_share: 0,
            traffic_class: Config::UNDEFINED,
        }
    }
}

type CollectiveFn =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int;
type GatherFn =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, *mut c_void, *mut c_void) -> c_int;
type ReduceFn = unsafe extern "C" fn(
    *const c_void,
    *mut c_void,
    usize,
    c_int,
    c_int,
    c_int,
    *mut c_void,
    *mut c_void,
) -> c_int;
type SendFn = unsafe extern "C" fn(*const c_void, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int;
type ReceiveFn = unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int;

/// The library and its functions.
pub(super) struct Api {
    /// The name or path that it was loaded by.
    pub name: String,
    pub version: Version,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    last_error: unsafe extern "C" fn(*mut c_void) -> *const c_char,
    unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    init: unsafe extern "C" fn(*mut *mut c_void, c_int, UniqueId, c_int, *mut Config) -> c_int,
    split: unsafe extern "C" fn(*mut c_void, c_int, c_int, *mut *mut c_void, *mut Config) -> c_int,
    destroy: unsafe extern "C" fn(*mut c_void) -> c_int,
    abort: unsafe extern "C" fn(*mut c_void) -> c_int,
    async_error: unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int,
    all_reduce: CollectiveFn,
    reduce_scatter: CollectiveFn,
    all_gather: GatherFn,
    broadcast: CollectiveFn,
    reduce: ReduceFn,
    send: SendFn,
    receive: ReceiveFn,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
    _library: Library,
}

/// The library of this process, loaded once.
pub(super) fn api() -> Result<&'static Api, LoadError> {
    static API: OnceLock<Result<Api, LoadError>> = OnceLock::new();
    API.get_or_init(load).as_ref().map_err(Clone::clone)
}

fn load() -> Result<Api, LoadError> {
    // SAFETY: loading NCCL runs no code but its initialisers.
    let open = |name: &str| unsafe { Library::new(name) };
    let named = env::var(VARIABLE).ok().filter(|name| !name.is_empty());
    if let Some(name) = named {
        let library = open(&name)
            .map_err(|error| LoadError::Named { name: name.clone(), reason: error.to_string() })?;
        return functions(name, library);
    }
    let found = NAMES.into_iter().find_map(|name| Some((name, open(name).ok()?)));
    let (name, library) = found.ok_or(LoadError::Missing)?;
    functions(name.to_owned(), library)
}

fn functions(name: String, library: Library) -> Result<Api, LoadError> {
    /// The address of a function.
    fn symbol<T: Copy>(library: &Library, name: &str, symbol: &'static str) -> Result<T, LoadError> {
        // SAFETY: the types of the fields above are those of nccl.h, in all versions since 2.18.
        let found = unsafe { library.get::<T>(symbol.as_bytes()) };
        found.map(|found| *found).map_err(|_| LoadError::Incomplete { name: name.to_owned(), symbol })
    }
    macro_rules! get {
        ($symbol:literal) => {
            symbol(&library, &name, $symbol)?
        };
    }
    let get_version: unsafe extern "C" fn(*mut c_int) -> c_int = get!("ncclGetVersion");
    let mut code = 0;
    // SAFETY: an integer to write to.
    unsafe { get_version(&raw mut code) };
    Ok(Api {
        version: Version::of(code),
        error_string: get!("ncclGetErrorString"),
        last_error: get!("ncclGetLastError"),
        unique_id: get!("ncclGetUniqueId"),
        init: get!("ncclCommInitRankConfig"),
        split: get!("ncclCommSplit"),
        destroy: get!("ncclCommDestroy"),
        abort: get!("ncclCommAbort"),
        async_error: get!("ncclCommGetAsyncError"),
        all_reduce: get!("ncclAllReduce"),
        reduce_scatter: get!("ncclReduceScatter"),
        all_gather: get!("ncclAllGather"),
        broadcast: get!("ncclBroadcast"),
        reduce: get!("ncclReduce"),
        send: get!("ncclSend"),
        receive: get!("ncclRecv"),
        group_start: get!("ncclGroupStart"),
        group_end: get!("ncclGroupEnd"),
        name,
        _library: library,
    })
}

/// `ncclSum`.
const SUM: c_int = 0;

/// The color of a rank that is in no part of a split.
const NO_COLOR: c_int = -1;

/// `ncclInProgress`, which is no error.
const IN_PROGRESS: c_int = 7;

/// The library's number of a type.
fn number(dtype: DType) -> c_int {
    match dtype {
        DType::U8 => 1,
        DType::U32 => 3,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::BF16 => 9,
    }
}

/// Elements of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Elements {
    pub address: u64,
    pub len: usize,
    pub dtype: DType,
}

impl Elements {
    /// A part of it.
    pub fn part(self, range: &std::ops::Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} elements", self.len);
        let address = self.address + (range.start * self.dtype.bytes()) as u64;
        Elements { address, len: range.len(), ..self }
    }

    fn pointer(self) -> *mut c_void {
        self.address as *mut c_void
    }
}

/// A communicator and the stream on which it works.
#[derive(Clone, Copy)]
pub(super) struct EnqueueTarget {
    pub communicator: Handle,
    pub stream: *mut c_void,
}

/// The calls. Those that enqueue work share a contract: the elements are device memory that nobody else uses until the stream
/// has run the work, the communicator and the stream are alive, and no other thread uses the communicator.
impl Api {
    fn check(&self, call: &'static str, status: c_int) -> Result<(), NcclError> {
        if status == 0 || status == IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: both return a string that lives as long as the library, or null.
        let text = |text: *const c_char| unsafe {
            if text.is_null() { String::new() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
        };
        // SAFETY: any number is allowed, and the communicator is not used.
        let (kind, last) =
            unsafe { (text((self.error_string)(status)), text((self.last_error)(ptr::null_mut()))) };
        let last = last.trim().lines().next_back().unwrap_or_default().to_owned();
        let message = if last.is_empty() { kind } else { format!("{kind} ({last})") };
        Err(NcclError { call, message })
    }

    /// A new id, by which ranks find each other.
    pub fn unique_id(&self) -> Result<UniqueId, NcclError> {
        let mut id = UniqueId([0; UniqueId::BYTES]);
        // SAFETY: an id to write to.
        let status = unsafe { (self.unique_id)(&raw mut id) };
        self.check("ncclGetUniqueId", status)?;
        Ok(id)
    }

    /// Joins a communicator of `ranks` ranks, on the current device. Waits for all of them.
    pub fn init(&self, id: UniqueId, ranks: usize, me: usize, channels: u32) -> Result<Handle, NcclError> {
        let (mut handle, mut config) = (ptr::null_mut(), Config::new(channels));
        // SAFETY: pointers to live values.
        let status =
            unsafe { (self.init)(&raw mut handle, ranks as c_int, id, me as c_int, &raw mut config) };
        self.check("ncclCommInitRankConfig", status)?;
        Ok(Handle(handle))
    }

    /// Splits a communicator. All its ranks call it. Those with the same color are together, in the order of their keys. A rank
    /// without a color gets `None`.
    pub fn split(
        &self,
        parent: Handle,
        color: Option<usize>,
        key: usize,
        channels: u32,
    ) -> Result<Option<Handle>, NcclError> {
        let (mut handle, mut config) = (ptr::null_mut(), Config::new(channels));
        let number = color.map_or(NO_COLOR, |color| color as c_int);
        // SAFETY: pointers to live values, and a live communicator that only this thread uses.
        let status =
            unsafe { (self.split)(parent.0, number, key as c_int, &raw mut handle, &raw mut config) };
        self.check("ncclCommSplit", status)?;
        Ok(color.map(|_| Handle(handle)))
    }

    /// Frees a communicator after its work has ended.
    ///
    /// # Safety
    /// The communicator is alive, and nobody uses it any more.
    pub unsafe fn destroy(&self, communicator: Handle) {
        // SAFETY: the caller's promise. There is nobody to tell of a failure.
        unsafe { (self.destroy)(communicator.0) };
    }

    /// Ends the work of a communicator at once, and frees it.
    ///
    /// # Safety
    /// The communicator is alive, and nobody uses it afterwards.
    pub unsafe fn abort(&self, communicator: Handle) {
        // SAFETY: the caller's promise. There is nobody to tell of a failure.
        unsafe { (self.abort)(communicator.0) };
    }

    /// The error that a communicator has found in its work, if it has found one.
    ///
    /// # Safety
    /// The communicator is alive.
    pub unsafe fn async_error(&self, communicator: Handle) -> Result<(), NcclError> {
        let mut found = 0;
        // SAFETY: the caller's promise, and an integer to write to.
        let status = unsafe { (self.async_error)(communicator.0, &raw mut found) };
        self.check("ncclCommGetAsyncError", status)?;
        self.check("a transfer of NCCL", found)
    }

    /// Sums elements over all ranks.
    ///
    /// # Safety
    /// See the contract above.
    pub unsafe fn all_reduce(&self, of: Elements, target: EnqueueTarget) -> Result<(), NcclError> {
        let (pointer, dtype) = (of.pointer(), number(of.dtype));
        // SAFETY: the caller's promise. The library allows the same address twice.
        let status = unsafe {
            (self.all_reduce)(pointer, pointer, of.len, dtype, SUM, target.communicator.0, target.stream)
        };
        self.check("ncclAllReduce", status)
    }

    /// Gathers `own`, this rank's part of `all`. All parts have the same length.
    ///
    /// # Safety
    /// See the contract above.
    pub unsafe fn all_gather(
        &self,
        own: Elements,
        all: Elements,
        target: EnqueueTarget,
    ) -> Result<(), NcclError> {
        let dtype = number(own.dtype);
        // SAFETY: the caller's promise. The library works in place if a rank's part is at its place.
        let status = unsafe {
            (self.all_gather)(
                own.pointer(),
                all.pointer(),
                own.len,
                dtype,
                target.communicator.0,
                target.stream,
            )
        };
        self.check("ncclAllGather", status)
    }

    /// Sums `all` over all ranks into `own`, this rank's part of it. All parts have the same length.
    ///
    /// # Safety
    /// See the contract above.
    pub unsafe fn reduce_scatter(
        &self,
        own: Elements,
        all: Elements,
        target: EnqueueTarget,
    ) -> Result<(), NcclError> {
        let (from, to, dtype) = (all.pointer(), own.pointer(), number(own.dtype));
        // SAFETY: as in `all_gather`.
        let status = unsafe {
            (self.reduce_scatter)(from, to, own.len, dtype, SUM, target.communicator.0, target.stream)
        };
        self.check("ncclReduceScatter", status)
    }

    /// Gives every rank the elements of rank `root`.
    ///
    /// # Safety
    /// See the contract above.
    pub unsafe fn broadcast(
        &self,
        of: Elements,
        root: usize,
        target: EnqueueTarget,
    ) -> Result<(), NcclError> {
        let (pointer, dtype) = (of.pointer(), number(of.dtype));
        // SAFETY: as in `all_reduce`.
        let status = unsafe {
            (self.broadcast)(
                pointer,
                pointer,
                of.len,
                dtype,
                root as c_int,
                target.communicator.0,
                target.stream,
            )
        };
        self.check("ncclBroadcast", status)
    }

    /// Sums elements over all ranks into those of rank `root`.
    ///
    /// # Safety
    /// See the contract above.
    pub unsafe fn reduce(&self, of: Elements, root: usize, target: EnqueueTarget) -> Result<(), NcclError> {
        let (pointer, dtype, root) = (of.pointer(), number(of.dtype), root as c_int);
        // SAFETY: as in `all_reduce`.
        let status = unsafe {
            (self.reduce)(pointer, pointer, of.len, dtype, SUM, root, target.communicator.0, target.stream)
        };
        self.check("ncclReduce", status)
    }

    /// Sends elements to rank `to` of the communicator.
    ///
    /// # Safety
    /// See the contract above.
    pub unsafe fn send(&self, of: Elements, to: usize, target: EnqueueTarget) -> Result<(), NcclError> {
        // SAFETY: the caller's promise.
        let status = unsafe {
            (self.send)(
                of.pointer(),
                of.len,
                number(of.dtype),
                to as c_int,
                target.communicator.0,
                target.stream,
            )
        };
        self.check("ncclSend", status)
    }

    /// Receives elements from rank `from` of the communicator.
    ///
    /// # Safety
    /// See the contract above.
    pub unsafe fn receive(&self, of: Elements, from: usize, target: EnqueueTarget) -> Result<(), NcclError> {
        // SAFETY: the caller's promise.
        let status = unsafe {
            (self.receive)(
                of.pointer(),
                of.len,
                number(of.dtype),
                from as c_int,
                target.communicator.0,
                target.stream,
            )
        };
        self.check("ncclRecv", status)
    }

    /// Joins the calls of `calls` to one piece of work.
    pub fn grouped(&self, calls: impl FnOnce() -> Result<(), NcclError>) -> Result<(), NcclError> {
        // SAFETY: no arguments. Every start has an end on the same thread.
        self.check("ncclGroupStart", unsafe { (self.group_start)() })?;
        let called = calls();
        // SAFETY: as above.
        let ended = self.check("ncclGroupEnd", unsafe { (self.group_end)() });
        called.and(ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_both_schemes_are_read() {
        assert_eq!(Version::of(2_708).to_string(), "2.7.8");
        assert_eq!(Version::of(21_805).to_string(), "2.18.5");
        assert_eq!(Version::of(23_203).to_string(), "2.32.3");
        assert!(Version::of(22_809) < SHARED_GPU_VERSION && Version::of(22_900) >= SHARED_GPU_VERSION);
    }

    #[test]
    fn the_options_have_the_layout_of_the_header() {
        assert_eq!(size_of::<Config>(), 48);
        assert_eq!(std::mem::offset_of!(Config, net_name), 32);
        assert_eq!(std::mem::offset_of!(Config, split_share), 40);
    }

    #[test]
    fn a_missing_library_says_what_was_tried() {
        let text = LoadError::Missing.to_string();
        assert!(text.contains("libnccl.so.2, libnccl.so, librccl.so.1, librccl.so"), "{text}");
        let open = functions("libc.so.6".to_owned(), {
            // SAFETY: the C library is loaded already.
            unsafe { Library::new("libc.so.6") }.expect("every program has it")
        });
        let error = open.err().expect("the C library is no NCCL").to_string();
        assert_eq!(error, "libc.so.6 has no ncclGetVersion; NCCL 2.18 or newer is needed");
    }
}
