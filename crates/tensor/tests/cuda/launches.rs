//! What the card ran, and when.

use std::time::Duration;

use kintsugi_tensor::ops::Linear;
use kintsugi_tensor::{Backend, Category, DType};

use crate::lab::{Lab, card};

const ROWS: usize = 256;
const WIDTH: usize = 128;

#[test]
fn what_was_enqueued_has_names_and_times() {
    let Some(card) = card() else { return };
    let lab = Lab { backend: &card, dtype: DType::BF16 };
    let (x, weight) = (lab.input(ROWS * WIDTH, 1), lab.input(WIDTH * WIDTH, 2));
    let out = card.allocate(ROWS * WIDTH, DType::BF16, Category::Activations);
    let work = || {
        card.linear(Linear {
            x: x.view(),
            weight: weight.view(),
            bias: None,
            gelu: None,
            residual: None,
            out: out.view(),
            rows: ROWS,
            inputs: WIDTH,
            outputs: WIDTH,
        });
        card.add(x.view(), out.view());
    };
    work();
    assert!(card.launches().is_empty(), "nobody asked");
    let begun = card.mark();
    card.note_launches();
    work();
    let launches = card.launches();
    let ended = card.mark();
    let names: Vec<&str> = launches.iter().map(|launch| launch.name.as_str()).collect();
    assert_eq!(names.len(), 2, "{names:?}");
    assert_eq!(names[0], "product 256 × 128 × 128");
    assert!(names[1].starts_with("add"), "{names:?}");
    let mut last = begun.since(&begun);
    for launch in &launches {
        let (from, to) = (launch.begun.since(&begun), launch.ended.since(&begun));
        assert!(last <= from && from < to, "{launches:?}");
        last = to;
    }
    assert!(last <= ended.since(&begun) && last < Duration::from_secs(1), "{launches:?}");
    work();
    assert!(card.launches().is_empty(), "nobody asks any more");
}
