//! What a rank is doing, for error messages.

use std::fmt;

use kintsugi_spec::Group;

use crate::{Collective, Tag};

/// What a rank is doing.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Activity {
    Collective {
        group: Group,
        collective: Collective,
        sequence: u64,
    },
    Message {
        group: Group,
        from: usize,
        to: usize,
        tag: Tag,
    },
    /// Making a group.
    Group {
        group: Group,
    },
    /// The end of the job.
    End,
    /// An exchange of results or settings outside of any group.
    Exchange {
        from: usize,
        to: usize,
    },
}

impl fmt::Display for Activity {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Activity::Collective { group, collective, sequence } => {
                write!(f, "{} number {sequence} of group {group}", collective.operation().name())
            }
            Activity::Message { group, from, to, tag } => {
                write!(f, "send from rank {from} to rank {to} with tag {tag} of group {group}")
            }
            Activity::Group { group } => write!(f, "making group {group}"),
            Activity::End => f.write_str("the end of the job"),
            Activity::Exchange { from, to } => {
                write!(f, "an exchange of settings or results from rank {from} to rank {to}")
            }
        }
    }
}
