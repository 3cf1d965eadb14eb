//! Owning wrappers of cuDNN's backend descriptors.
//!
//! A descriptor is drafted by setting attributes, then finalized once, and never changed after that. It is destroyed
//! when its wrapper is dropped.

use std::ffi::{CStr, c_char, c_void};

use cudarc::cudnn::sys::{
    self, cudnnBackendAttributeName_t as Name, cudnnBackendAttributeType_t as Type,
    cudnnBackendDescriptorType_t as Kind, cudnnStatus_t,
};

use crate::error::GpuError;

/// A cuDNN handle, bound to one stream.
#[derive(Debug)]
pub struct Handle(sys::cudnnHandle_t);

impl Handle {
    /// A handle whose work is enqueued on `stream`. cuDNN must have been loaded.
    pub fn new(stream: cudarc::driver::sys::CUstream) -> Result<Self, GpuError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` has room for a handle, and `stream` belongs to the current context.
        unsafe {
            check("cudnnCreate", sys::cudnnCreate(&raw mut handle))?;
            let handle = Handle(handle);
            check("cudnnSetStream", sys::cudnnSetStream(handle.0, stream.cast()))?;
            Ok(handle)
        }
    }

    /// Enqueues a plan.
    ///
    /// # Safety
    /// `pack` must hold the pointers that the plan needs, to memory that lives until the plan has run.
    pub unsafe fn execute(&self, plan: &Descriptor, pack: &Descriptor) -> Result<(), GpuError> {
        // SAFETY: all three are alive and finalized; the rest is the caller's promise.
        check("cudnnBackendExecute", unsafe { sys::cudnnBackendExecute(self.0, plan.0, pack.0) })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed nowhere else.
        let _ = unsafe { sys::cudnnDestroy(self.0) };
    }
}

/// A descriptor. It can be used once it is finalized.
#[derive(Debug)]
pub struct Descriptor(sys::cudnnBackendDescriptor_t);

impl Descriptor {
    /// An empty descriptor that cuDNN fills.
    pub fn empty(kind: Kind) -> Result<Self, GpuError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` has room for a descriptor.
        check("cudnnBackendCreateDescriptor", unsafe {
            sys::cudnnBackendCreateDescriptor(kind, &raw mut raw)
        })?;
        Ok(Descriptor(raw))
    }

    /// Reads an attribute that is one number.
    pub fn number(&self, name: Name) -> Result<i64, GpuError> {
        let (mut count, mut value) = (0, 0_i64);
        // SAFETY: one element is asked for, and `value` has room for it.
        let status = unsafe {
            let to = (&raw mut value).cast();
            sys::cudnnBackendGetAttribute(self.0, name, Type::CUDNN_TYPE_INT64, 1, &raw mut count, to)
        };
        check("cudnnBackendGetAttribute", status)?;
        Ok(value)
    }

    /// Reads an attribute that is a list of descriptors of one kind.
    pub fn list(&self, name: Name, kind: Kind) -> Result<Vec<Descriptor>, GpuError> {
        let available = self.fill(name, &mut [])?;
        let list = (0..available).map(|_| Descriptor::empty(kind)).collect::<Result<Vec<_>, _>>()?;
        let mut raw: Vec<_> = list.iter().map(|descriptor| descriptor.0).collect();
        let filled = self.fill(name, &mut raw)?;
        Ok(list.into_iter().take(filled).collect())
    }

    /// Lets cuDNN fill existing descriptors. Returns how many there are.
    fn fill(&self, name: Name, to: &mut [sys::cudnnBackendDescriptor_t]) -> Result<usize, GpuError> {
        let mut count = 0;
        let wanted = to.len() as i64;
        let array = if to.is_empty() { std::ptr::null_mut() } else { to.as_mut_ptr().cast() };
        // SAFETY: `array` holds as many descriptors as are asked for.
        let status = unsafe {
            let kind = Type::CUDNN_TYPE_BACKEND_DESCRIPTOR;
            sys::cudnnBackendGetAttribute(self.0, name, kind, wanted, &raw mut count, array)
        };
        check("cudnnBackendGetAttribute", status)?;
        Ok(count as usize)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: created in `empty`, destroyed nowhere else.
        let _ = unsafe { sys::cudnnBackendDestroyDescriptor(self.0) };
    }
}

/// A descriptor whose attributes are being set.
#[derive(Debug)]
pub struct Draft(Descriptor);

impl Draft {
    /// A draft without attributes.
    pub fn new(kind: Kind) -> Result<Self, GpuError> {
        Descriptor::empty(kind).map(Draft)
    }

    /// Sets an attribute.
    pub fn set<A: Attribute>(self, name: Name, value: A) -> Result<Self, GpuError> {
        self.set_all(name, &[value])
    }

    /// Sets an attribute that is an array.
    pub fn set_all<A: Attribute>(self, name: Name, values: &[A]) -> Result<Self, GpuError> {
        // SAFETY: the elements have the layout that their type's number stands for, and cuDNN copies them.
        let status = unsafe {
            let array = values.as_ptr().cast();
            sys::cudnnBackendSetAttribute(self.0.0, name, A::TYPE, values.len() as i64, array)
        };
        check("cudnnBackendSetAttribute", status)?;
        Ok(self)
    }

    /// Sets an attribute that is another descriptor, finalized and kept alive as long as this one.
    pub fn link(self, name: Name, to: &Descriptor) -> Result<Self, GpuError> {
        self.set(name, DescriptorPointer(to.0))
    }

    /// Sets an attribute that is an array of descriptors, under the same condition.
    pub fn link_all(self, name: Name, to: &[Descriptor]) -> Result<Self, GpuError> {
        let links: Vec<DescriptorPointer> =
            to.iter().map(|descriptor| DescriptorPointer(descriptor.0)).collect();
        self.set_all(name, &links)
    }

    /// Sets the handle for which a graph or a plan is built.
    pub fn handle(self, name: Name, handle: &Handle) -> Result<Self, GpuError> {
        self.set(name, HandleValue(handle.0))
    }

    /// Finalizes the descriptor.
    pub fn finish(self) -> Result<Descriptor, GpuError> {
        // SAFETY: a descriptor that is alive.
        check("cudnnBackendFinalize", unsafe { sys::cudnnBackendFinalize(self.0.0) })?;
        Ok(self.0)
    }
}

/// A value that an attribute can have.
///
/// # Safety
/// `TYPE` must be cuDNN's number for exactly this layout.
pub unsafe trait Attribute: Copy {
    /// cuDNN's name for the type.
    const TYPE: Type;
}

/// An address in a variant pack: of device memory, or on the host for a scalar that is passed by value.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Pointer(pub u64);

#[derive(Clone, Copy)]
#[repr(transparent)]
struct DescriptorPointer(*mut c_void);

#[derive(Clone, Copy)]
#[repr(transparent)]
struct HandleValue(sys::cudnnHandle_t);

/// Maps Rust types to cuDNN's attribute types.
macro_rules! attributes {
    ($($layout:ty => $name:ident),+ $(,)?) => {
        // SAFETY: these are the layouts of cudnn_backend.h.
        $(unsafe impl Attribute for $layout {
            const TYPE: Type = Type::$name;
        })+
    };
}

attributes! {
    i64 => CUDNN_TYPE_INT64,
    bool => CUDNN_TYPE_BOOLEAN,
    Pointer => CUDNN_TYPE_VOID_PTR,
    DescriptorPointer => CUDNN_TYPE_BACKEND_DESCRIPTOR,
    HandleValue => CUDNN_TYPE_HANDLE,
    sys::cudnnDataType_t => CUDNN_TYPE_DATA_TYPE,
    sys::cudnnPointwiseMode_t => CUDNN_TYPE_POINTWISE_MODE,
    sys::cudnnReduceTensorOp_t => CUDNN_TYPE_REDUCTION_OPERATOR_TYPE,
    sys::cudnnBackendHeurMode_t => CUDNN_TYPE_HEUR_MODE,
}

fn check(call: &'static str, status: cudnnStatus_t) -> Result<(), GpuError> {
    if status == cudnnStatus_t::CUDNN_STATUS_SUCCESS {
        return Ok(());
    }
    let mut reason = [0 as c_char; 1024];
    // SAFETY: cuDNN writes a string of at most so many bytes, its zero included, and the last byte stays zero.
    let reason = unsafe {
        sys::cudnnGetLastErrorString(reason.as_mut_ptr(), reason.len() - 1);
        CStr::from_ptr(reason.as_ptr()).to_string_lossy().into_owned()
    };
    Err(GpuError::Library { library: "cuDNN", call, status: format!("{status:?}: {reason}") })
}

/// The version of cuDNN, which must have been loaded: 91400 is 9.14.0.
pub fn version() -> usize {
    // SAFETY: no arguments.
    unsafe { sys::cudnnGetVersion() }
}
