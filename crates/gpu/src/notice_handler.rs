//! The callback that receives a backend's notices.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use kintsugi_tensor::Notice;

type Handler = Box<dyn Fn(Notice)>;

/// Passes notices to the handler, if one is set. Clones share the handler.
#[derive(Clone, Default)]
pub(crate) struct NoticeHandler(Rc<RefCell<Option<Handler>>>);

impl NoticeHandler {
    /// Replaces the handler.
    pub(crate) fn set(&self, handler: Handler) {
        self.0.replace(Some(handler));
    }

    /// Calls the handler.
    pub(crate) fn notify(&self, notice: Notice) {
        if let Some(handler) = &*self.0.borrow() {
            handler(notice);
        }
    }
}

impl fmt::Debug for NoticeHandler {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("NoticeHandler")
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_handler_set_last_receives_the_notices_of_every_clone() {
        let notices = NoticeHandler::default();
        let tuning = Notice::Autotuning { products: 0, spent: Duration::ZERO };
        notices.notify(tuning.clone());
        let received: [Rc<RefCell<Vec<Notice>>>; 2] = Default::default();
        for received in &received {
            let received = Rc::clone(received);
            notices.set(Box::new(move |notice| received.borrow_mut().push(notice)));
        }
        let replaced = Notice::LibraryReplaced("cuDNN".to_owned());
        notices.clone().notify(replaced.clone());
        notices.notify(tuning.clone());
        assert_eq!(received.map(|received| received.take()), [vec![], vec![replaced, tuning]]);
    }
}
