//! An MPI library, loaded at run time: the functions that this transport calls, over the three binary interfaces.
//!
//! MPI standardises a C interface, and until MPI 5 every library chose its own handles and constants. There are three
//! families: MPICH (with Cray, Intel and others) has integers as handles, Open MPI has pointers to exported objects, and the
//! standard ABI of MPI 5 has small numbers as pointers. This file alone knows of the difference.

use std::ffi::{CStr, OsString, c_char, c_int, c_void};
use std::fmt;
use std::path::Path;
use std::ptr;

use libloading::Library;

/// The binary interface of an MPI library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Abi {
    /// The MPICH family: MPICH, Cray MPICH, Intel MPI, MVAPICH.
    Mpich,
    /// Open MPI 4 and 5.
    OpenMpi,
    /// The standard ABI of MPI 5.
    Standard,
}

impl fmt::Display for Abi {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Abi::Mpich => "MPICH's ABI",
            Abi::OpenMpi => "Open MPI's ABI",
            Abi::Standard => "the standard ABI of MPI 5",
        })
    }
}

/// A handle of the library: a communicator, a group, a request or a type. Wide enough for every family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Handle(usize);

/// An error of an MPI call: what was called, and the library's words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed: {message}")]
pub struct MpiError {
    /// The function.
    pub call: &'static str,
    /// The library's message.
    pub message: String,
}

/// Why no MPI can be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// No library was found.
    #[error(
        "no MPI library was found (tried {}); install one (Debian: apt-get install openmpi-bin or mpich), or name yours \
         with {VARIABLE}=/path/to/libmpi.so",
        .0.join(", ")
    )]
    Missing(Vec<String>),
    /// The library that the user named cannot be loaded.
    #[error("{VARIABLE}={name} cannot be loaded: {reason}")]
    Named {
        /// The name.
        name: String,
        /// The loader's message.
        reason: String,
    },
    /// A library lacks a function, so it is no MPI 3 or newer.
    #[error("{name} is no MPI 3 or newer: it has no {symbol}")]
    Incomplete {
        /// The library.
        name: String,
        /// The missing function.
        symbol: &'static str,
    },
}

/// The environment variable that names the MPI library.
pub const VARIABLE: &str = "KINTSUGI_MPI";

/// How a family passes handles.
trait RawHandle: Copy {
    fn pack(self) -> Handle;
    fn unpack(handle: Handle) -> Self;
}

impl RawHandle for c_int {
    fn pack(self) -> Handle {
        Handle(self as u32 as usize)
    }

    fn unpack(handle: Handle) -> Self {
        handle.0 as c_int
    }
}

impl RawHandle for *mut c_void {
    fn pack(self) -> Handle {
        Handle(self as usize)
    }

    fn unpack(handle: Handle) -> Self {
        handle.0 as *mut c_void
    }
}

/// The functions, with the handles of one family.
struct Functions<H> {
    init_thread: unsafe extern "C" fn(*mut c_int, *mut c_void, c_int, *mut c_int) -> c_int,
    finalize: unsafe extern "C" fn() -> c_int,
    abort: unsafe extern "C" fn(H, c_int) -> c_int,
    error_string: unsafe extern "C" fn(c_int, *mut c_char, *mut c_int) -> c_int,
    library_version: unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int,
    processor_name: unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int,
    set_errhandler: unsafe extern "C" fn(H, H) -> c_int,
    comm_rank: unsafe extern "C" fn(H, *mut c_int) -> c_int,
    comm_size: unsafe extern "C" fn(H, *mut c_int) -> c_int,
    comm_group: unsafe extern "C" fn(H, *mut H) -> c_int,
    group_incl: unsafe extern "C" fn(H, c_int, *const c_int, *mut H) -> c_int,
    group_free: unsafe extern "C" fn(*mut H) -> c_int,
    comm_create_group: unsafe extern "C" fn(H, H, c_int, *mut H) -> c_int,
    comm_free: unsafe extern "C" fn(*mut H) -> c_int,
    get_attribute: unsafe extern "C" fn(H, c_int, *mut *mut c_int, *mut c_int) -> c_int,
    isend: unsafe extern "C" fn(*const c_void, c_int, H, c_int, c_int, H, *mut H) -> c_int,
    irecv: unsafe extern "C" fn(*mut c_void, c_int, H, c_int, c_int, H, *mut H) -> c_int,
    iallreduce: unsafe extern "C" fn(*const c_void, *mut c_void, c_int, H, H, H, *mut H) -> c_int,
    allreduce: unsafe extern "C" fn(*const c_void, *mut c_void, c_int, H, H, H) -> c_int,
    test: unsafe extern "C" fn(*mut H, *mut c_int, *mut Status) -> c_int,
    get_count: unsafe extern "C" fn(*const Status, H, *mut c_int) -> c_int,
    constants: Constants<H>,
    /// Keeps the functions loaded. MPI is never unloaded: it has threads and exit handlers of its own.
    _library: &'static Library,
}

/// The constants of a family.
struct Constants<H> {
    world: H,
    byte: H,
    float: H,
    double: H,
    sum: H,
    errors_return: H,
    serialized: c_int,
    tag_upper_bound: c_int,
    in_place: usize,
}

/// Space for the `MPI_Status` of any family; the largest has 32 bytes.
#[repr(C, align(8))]
struct Status([u8; 64]);

/// Bytes for a name or a message of any family; the longest has 8192.
const TEXT: usize = 8192 + 1;

/// A loaded MPI library, of any family.
pub(super) trait Api: Send {
    /// Starts MPI. Returns whether any thread may call it, one at a time.
    fn init(&self) -> Result<bool, MpiError>;
    /// Ends MPI. Every process calls it.
    fn finalize(&self);
    /// Ends all processes.
    fn abort(&self, code: i32);
    /// The library's name and version, in one line.
    fn version(&self) -> String;
    /// The name of this host.
    fn host(&self) -> String;
    /// The communicator of all processes.
    fn world(&self) -> Handle;
    /// This process's rank and the number of processes.
    fn rank_and_size(&self) -> Result<(usize, usize), MpiError>;
    /// The largest tag.
    fn largest_tag(&self) -> usize;
    /// A communicator of some ranks of the world. All of them call it.
    fn create(&self, members: &[usize]) -> Result<Handle, MpiError>;
    /// Frees a communicator. All of its ranks call it.
    fn free(&self, communicator: Handle);
    /// Starts sending bytes.
    ///
    /// # Safety
    /// The bytes must stay valid and unchanged until the request has finished.
    unsafe fn isend(
        &self,
        bytes: Bytes,
        to: usize,
        tag: i32,
        communicator: Handle,
    ) -> Result<Handle, MpiError>;
    /// Starts receiving bytes.
    ///
    /// # Safety
    /// The bytes must stay valid, and nobody may use them, until the request has finished.
    unsafe fn irecv(
        &self,
        bytes: Bytes,
        from: usize,
        tag: i32,
        communicator: Handle,
    ) -> Result<Handle, MpiError>;
    /// Starts the library's own sum over all ranks of a communicator, in place.
    ///
    /// # Safety
    /// There must be `count` numbers, in f64 if `wide` or else in f32, and they must stay valid, and nobody may use them, until
    /// the request has finished.
    unsafe fn iallreduce(
        &self,
        address: usize,
        count: usize,
        wide: bool,
        communicator: Handle,
    ) -> Result<Handle, MpiError>;
    /// The library's own sum over all ranks of a communicator, in place. Returns when it is done.
    ///
    /// # Safety
    /// There must be `count` numbers, in f64 if `wide` or else in f32, and nobody else may use them.
    unsafe fn allreduce(
        &self,
        address: usize,
        count: usize,
        wide: bool,
        communicator: Handle,
    ) -> Result<(), MpiError>;
    /// Whether a request has finished, and then how many bytes were received. A finished request is freed.
    fn test(&self, request: &mut Handle) -> Result<Option<usize>, MpiError>;
}

/// Some bytes of this process, at most [`MAX_BYTES`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Bytes {
    pub address: usize,
    pub len: usize,
}

/// The most bytes of one message: MPI counts with a C `int`.
pub(super) const MAX_BYTES: usize = 1 << 30;

// SAFETY: the functions are plain addresses of a library that is never unloaded, and handles are numbers. Which thread may
// call them is the caller's concern (`Mpi` holds a lock around every call).
unsafe impl<H> Send for Functions<H> {}

impl<H: RawHandle> Functions<H> {
    fn check(&self, call: &'static str, code: c_int) -> Result<(), MpiError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: `text` has room for the longest message.
        let message = text(|text, len| unsafe { (self.error_string)(code, text, len) });
        Err(MpiError { call, message: message.unwrap_or_else(|| format!("error {code}")) })
    }
}

impl<H: RawHandle> Api for Functions<H> {
    fn init(&self) -> Result<bool, MpiError> {
        let mut granted = 0;
        let wanted = self.constants.serialized;
        // SAFETY: MPI allows null for the arguments of the program.
        let code = unsafe { (self.init_thread)(ptr::null_mut(), ptr::null_mut(), wanted, &raw mut granted) };
        self.check("MPI_Init_thread", code)?;
        // SAFETY: MPI is initialised, and both are handles of this library.
        let code = unsafe { (self.set_errhandler)(self.constants.world, self.constants.errors_return) };
        self.check("MPI_Comm_set_errhandler", code)?;
        Ok(granted >= wanted)
    }

    fn finalize(&self) {
        // SAFETY: every process of the job calls it once, at its end.
        unsafe { (self.finalize)() };
    }

    fn abort(&self, code: i32) {
        // SAFETY: the world is a communicator of this library.
        unsafe { (self.abort)(self.constants.world, code) };
    }

    fn version(&self) -> String {
        // SAFETY: `text` has room for the longest version.
        let version = text(|text, len| unsafe { (self.library_version)(text, len) }).unwrap_or_default();
        // MPICH adds how it was configured, in many lines, and Open MPI its package, after a comma.
        let name = version.lines().next().and_then(|line| line.split(',').next()).unwrap_or_default();
        name.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    fn host(&self) -> String {
        // SAFETY: `text` has room for the longest name.
        text(|text, len| unsafe { (self.processor_name)(text, len) }).unwrap_or_default()
    }

    fn world(&self) -> Handle {
        self.constants.world.pack()
    }

    fn rank_and_size(&self) -> Result<(usize, usize), MpiError> {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: the world is a communicator of this library, and both results have their place.
        let code = unsafe { (self.comm_rank)(self.constants.world, &raw mut rank) };
        self.check("MPI_Comm_rank", code)?;
        // SAFETY: as above.
        let code = unsafe { (self.comm_size)(self.constants.world, &raw mut size) };
        self.check("MPI_Comm_size", code)?;
        Ok((rank as usize, size as usize))
    }

    fn largest_tag(&self) -> usize {
        /// What the standard guarantees.
        const GUARANTEED: usize = 32767;
        let (mut value, mut found) = (ptr::null_mut(), 0);
        let (world, key) = (self.constants.world, self.constants.tag_upper_bound);
        // SAFETY: the attribute is a pointer to an int, which MPI keeps.
        let code = unsafe { (self.get_attribute)(world, key, &raw mut value, &raw mut found) };
        if code != 0 || found == 0 || value.is_null() {
            return GUARANTEED;
        }
        // SAFETY: as above.
        unsafe { *value as usize }
    }

    fn create(&self, members: &[usize]) -> Result<Handle, MpiError> {
        let ranks: Vec<c_int> = members.iter().map(|&rank| rank as c_int).collect();
        let mut all = self.constants.world;
        // SAFETY: the handles are of this library, and every result has its place.
        unsafe {
            self.check("MPI_Comm_group", (self.comm_group)(self.constants.world, &raw mut all))?;
            let mut group = all;
            let code = (self.group_incl)(all, ranks.len() as c_int, ranks.as_ptr(), &raw mut group);
            self.check("MPI_Group_incl", code)?;
            let mut communicator = self.constants.world;
            let code = (self.comm_create_group)(self.constants.world, group, 0, &raw mut communicator);
            self.check("MPI_Comm_create_group", code)?;
            (self.group_free)(&raw mut group);
            (self.group_free)(&raw mut all);
            let code = (self.set_errhandler)(communicator, self.constants.errors_return);
            self.check("MPI_Comm_set_errhandler", code)?;
            Ok(communicator.pack())
        }
    }

    fn free(&self, communicator: Handle) {
        let mut communicator = H::unpack(communicator);
        // SAFETY: the communicator was made by `create`, and its owner does not use it again.
        unsafe { (self.comm_free)(&raw mut communicator) };
    }

    unsafe fn isend(
        &self,
        bytes: Bytes,
        to: usize,
        tag: i32,
        communicator: Handle,
    ) -> Result<Handle, MpiError> {
        let (communicator, byte) = (H::unpack(communicator), self.constants.byte);
        let (from, len, mut request) = (bytes.address as *const c_void, bytes.len as c_int, byte);
        // SAFETY: the caller keeps the bytes until the request has finished.
        let code = unsafe { (self.isend)(from, len, byte, to as c_int, tag, communicator, &raw mut request) };
        self.check("MPI_Isend", code).map(|()| request.pack())
    }

    unsafe fn irecv(
        &self,
        bytes: Bytes,
        from: usize,
        tag: i32,
        communicator: Handle,
    ) -> Result<Handle, MpiError> {
        let (communicator, byte) = (H::unpack(communicator), self.constants.byte);
        let (to, len, mut request) = (bytes.address as *mut c_void, bytes.len as c_int, byte);
        // SAFETY: the caller keeps the bytes until the request has finished.
        let code = unsafe { (self.irecv)(to, len, byte, from as c_int, tag, communicator, &raw mut request) };
        self.check("MPI_Irecv", code).map(|()| request.pack())
    }

    unsafe fn iallreduce(
        &self,
        address: usize,
        count: usize,
        wide: bool,
        communicator: Handle,
    ) -> Result<Handle, MpiError> {
        let constants = &self.constants;
        let dtype = if wide { constants.double } else { constants.float };
        let (from, to) = (constants.in_place as *const c_void, address as *mut c_void);
        let (communicator, mut request) = (H::unpack(communicator), dtype);
        // SAFETY: the caller keeps the numbers until the request has finished.
        let code = unsafe {
            (self.iallreduce)(from, to, count as c_int, dtype, constants.sum, communicator, &raw mut request)
        };
        self.check("MPI_Iallreduce", code).map(|()| request.pack())
    }

    unsafe fn allreduce(
        &self,
        address: usize,
        count: usize,
        wide: bool,
        communicator: Handle,
    ) -> Result<(), MpiError> {
        let constants = &self.constants;
        let dtype = if wide { constants.double } else { constants.float };
        let (from, to) = (constants.in_place as *const c_void, address as *mut c_void);
        let communicator = H::unpack(communicator);
        // SAFETY: as asked of the caller.
        let code = unsafe { (self.allreduce)(from, to, count as c_int, dtype, constants.sum, communicator) };
        self.check("MPI_Allreduce", code)
    }

    fn test(&self, request: &mut Handle) -> Result<Option<usize>, MpiError> {
        let (mut raw, mut finished, mut status) = (H::unpack(*request), 0, Status([0; 64]));
        // SAFETY: the request is active, and every result has its place.
        let code = unsafe { (self.test)(&raw mut raw, &raw mut finished, &raw mut status) };
        *request = raw.pack();
        self.check("MPI_Test", code)?;
        if finished == 0 {
            return Ok(None);
        }
        let mut count = 0;
        // SAFETY: the status is that of a finished request.
        let code = unsafe { (self.get_count)(&raw const status, self.constants.byte, &raw mut count) };
        self.check("MPI_Get_count", code)?;
        Ok(Some(count as usize))
    }
}

/// What a function writes into a buffer of [`TEXT`] bytes.
fn text(write: impl FnOnce(*mut c_char, *mut c_int) -> c_int) -> Option<String> {
    let (mut bytes, mut len) = ([0_u8; TEXT], 0);
    let code = write(bytes.as_mut_ptr().cast(), &raw mut len);
    let text = CStr::from_bytes_until_nul(&bytes).ok()?;
    (code == 0).then(|| text.to_string_lossy().into_owned())
}

/// A library and where it was found.
pub(super) struct Loaded {
    pub api: Box<dyn Api>,
    pub abi: Abi,
    /// Its name or path.
    pub name: String,
}

/// The usual names of the libraries of each family.
const OPEN_MPI: [&str; 2] = ["libmpi.so.40", "libmpi.so.80"];
const MPICH: [&str; 5] =
    ["libmpich.so.12", "libmpi.so.12", "libmpi_cray.so.12", "libmpi_gnu_123.so.12", "libmpi_intel.so.12"];
const STANDARD: [&str; 2] = ["libmpi_abi.so.1", "libmpi_abi.so.0"];

/// Loads the MPI that the user named, or else the first of the usual ones. Those of the launcher's family come first.
pub(super) fn load(launcher: Option<Abi>) -> Result<Loaded, LoadError> {
    if let Some(name) = std::env::var_os(VARIABLE).filter(|name| !name.is_empty()) {
        let library = open(&name).map_err(|error| LoadError::Named {
            name: name.to_string_lossy().into_owned(),
            reason: error.to_string(),
        })?;
        return bind(library, &name.to_string_lossy());
    }
    let names: Vec<&str> = match launcher {
        Some(Abi::Mpich) => [&MPICH[..], &STANDARD, &OPEN_MPI].concat(),
        Some(Abi::OpenMpi) | None => [&OPEN_MPI[..], &STANDARD, &MPICH].concat(),
        Some(Abi::Standard) => [&STANDARD[..], &OPEN_MPI, &MPICH].concat(),
    };
    for name in &names {
        if let Ok(library) = open(&OsString::from(name)) {
            return bind(library, name);
        }
    }
    Err(LoadError::Missing(names.into_iter().map(str::to_owned).collect()))
}

/// Opens a library so that its own plugins see its symbols, as a program that is linked to it would.
fn open(name: &OsString) -> Result<&'static Library, libloading::Error> {
    use libloading::os::unix;
    // SAFETY: an MPI library runs only its usual initialisers when it is loaded.
    let library = unsafe { unix::Library::open(Some(Path::new(name)), unix::RTLD_NOW | unix::RTLD_GLOBAL) };
    library.map(|library| &*Box::leak(Box::new(library.into())))
}

/// Finds out the family of a library, and its functions.
fn bind(library: &'static Library, name: &str) -> Result<Loaded, LoadError> {
    let abi = family(library);
    let api: Box<dyn Api> = match abi {
        // From MPICH's mpi.h: the numbers are part of the common ABI of its family.
        Abi::Mpich => Box::new(functions(library, name, || {
            Ok(Constants {
                world: 0x4400_0000,
                byte: 0x4c00_010d,
                float: 0x4c00_040a,
                double: 0x4c00_080b,
                sum: 0x5800_0003,
                errors_return: 0x5400_0001,
                serialized: 2,
                tag_upper_bound: 0x6440_0001,
                in_place: usize::MAX,
            })
        })?),
        Abi::OpenMpi => Box::new(functions(library, name, || {
            let object = |symbol| object(library, name, symbol);
            Ok(Constants {
                world: object("ompi_mpi_comm_world")?,
                byte: object("ompi_mpi_byte")?,
                float: object("ompi_mpi_float")?,
                double: object("ompi_mpi_double")?,
                sum: object("ompi_mpi_op_sum")?,
                errors_return: object("ompi_mpi_errors_return")?,
                serialized: 2,
                tag_upper_bound: 0,
                in_place: 1,
            })
        })?),
        // From the MPI 5.0 standard, annex A.
        Abi::Standard => Box::new(functions(library, name, || {
            let number = |number: usize| number as *mut c_void;
            Ok(Constants {
                world: number(0x101),
                byte: number(0x247),
                float: number(0x210),
                double: number(0x214),
                sum: number(0x21),
                errors_return: number(0x143),
                serialized: 2048,
                tag_upper_bound: 501,
                in_place: 1,
            })
        })?),
    };
    Ok(Loaded { api, abi, name: name.to_owned() })
}

fn family(library: &Library) -> Abi {
    type AbiVersion = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
    let (mut major, mut minor) = (-1, -1);
    // SAFETY: MPI 5 defines this function, which may be called before MPI_Init. A library with another ABI answers −1.
    if let Ok(version) = unsafe { library.get::<AbiVersion>("MPI_Abi_get_version") } {
        // SAFETY: both results have their place.
        unsafe { version(&raw mut major, &raw mut minor) };
    }
    // SAFETY: only whether there is such a symbol matters.
    let open_mpi = unsafe { library.get::<*mut c_void>("ompi_mpi_comm_world") }.is_ok();
    match (open_mpi, major) {
        (true, _) => Abi::OpenMpi,
        (false, 1..) => Abi::Standard,
        (false, _) => Abi::Mpich,
    }
}

/// The address of an exported object, which is Open MPI's handle of it.
fn object(library: &Library, name: &str, symbol: &'static str) -> Result<*mut c_void, LoadError> {
    // SAFETY: only its address is taken.
    let address = unsafe { library.get::<*mut c_void>(symbol).map(|found| found.try_as_raw_ptr()) };
    address.ok().flatten().ok_or_else(|| LoadError::Incomplete { name: name.to_owned(), symbol })
}

fn functions<H: RawHandle>(
    library: &'static Library,
    name: &str,
    constants: impl FnOnce() -> Result<Constants<H>, LoadError>,
) -> Result<Functions<H>, LoadError> {
    macro_rules! function {
        ($symbol:literal) => {
            // SAFETY: the MPI standard defines the signature, with the handles of the library's family.
            *unsafe { library.get($symbol) }
                .map_err(|_| LoadError::Incomplete { name: name.to_owned(), symbol: $symbol })?
        };
    }
    Ok(Functions {
        init_thread: function!("MPI_Init_thread"),
        finalize: function!("MPI_Finalize"),
        abort: function!("MPI_Abort"),
        error_string: function!("MPI_Error_string"),
        library_version: function!("MPI_Get_library_version"),
        processor_name: function!("MPI_Get_processor_name"),
        set_errhandler: function!("MPI_Comm_set_errhandler"),
        comm_rank: function!("MPI_Comm_rank"),
        comm_size: function!("MPI_Comm_size"),
        comm_group: function!("MPI_Comm_group"),
        group_incl: function!("MPI_Group_incl"),
        group_free: function!("MPI_Group_free"),
        comm_create_group: function!("MPI_Comm_create_group"),
        comm_free: function!("MPI_Comm_free"),
        get_attribute: function!("MPI_Comm_get_attr"),
        isend: function!("MPI_Isend"),
        irecv: function!("MPI_Irecv"),
        iallreduce: function!("MPI_Iallreduce"),
        allreduce: function!("MPI_Allreduce"),
        test: function!("MPI_Test"),
        get_count: function!("MPI_Get_count"),
        constants: constants()?,
        _library: library,
    })
}
