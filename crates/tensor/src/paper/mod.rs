//! The paper backend (under construction).
