//! Whoever listens to a card.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use crate::Notice;

type Hear = Box<dyn Fn(Notice)>;

/// What is told reaches the one that listens, if there is one; clones share it.
#[derive(Clone, Default)]
pub(crate) struct Listener(Rc<RefCell<Option<Hear>>>);

impl Listener {
    /// From now on `hear` is told.
    pub(crate) fn set(&self, hear: Hear) {
        self.0.replace(Some(hear));
    }

    pub(crate) fn tell(&self, notice: Notice) {
        if let Some(hear) = &*self.0.borrow() {
            hear(notice);
        }
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("Listener")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_that_listens_hears_what_any_clone_tells() {
        let listener = Listener::default();
        listener.tell(Notice::Trying);
        let heard: [Rc<RefCell<Vec<Notice>>>; 2] = Default::default();
        for heard in &heard {
            let heard = Rc::clone(heard);
            listener.set(Box::new(move |notice| heard.borrow_mut().push(notice)));
        }
        let refusal = Notice::Replaced("cuDNN".to_owned());
        listener.clone().tell(refusal.clone());
        listener.tell(Notice::Trying);
        assert_eq!(heard.map(|heard| heard.take()), [vec![], vec![refusal, Notice::Trying]]);
    }
}
