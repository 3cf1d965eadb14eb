//! The cause of an error.

use std::error::Error;
use std::fmt::{self, Display, Formatter};
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The error of a library or of the operating system, or a sentence. It is cheap to clone. Causes are equal if their
/// texts are equal.
#[derive(Clone, Debug)]
pub struct Cause(Arc<dyn Error + Send + Sync>);

impl Cause {
    /// A sentence, or any error.
    pub fn new(cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Cause(cause.into().into())
    }
}

impl Display for Cause {
    fn fmt(&self, f: &mut Formatter) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Error for Cause {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&*self.0)
    }
}

impl PartialEq for Cause {
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

impl Eq for Cause {}

/// As its text: the error of a system does not leave its process.
impl Serialize for Cause {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Cause {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(Cause::new)
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn the_error_of_the_system_is_kept() {
        let cause = Cause::new(io::Error::from_raw_os_error(28)).clone();
        let error = cause.source().and_then(|source| source.downcast_ref::<io::Error>());
        assert_eq!(error.and_then(io::Error::raw_os_error), Some(28));
        assert_eq!(Cause::new("it is no file"), Cause::new("it is no file".to_owned()));
    }
}
