//! Long series in few points: of every bin the smallest and the largest stay, so that no spike is lost.

use kintsugi_draw::chart::Means;

/// How many points of a long series are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// For a file: enough to zoom into a part of a run.
    File,
    /// For a page that is sent anew with every step: about as many as a screen has pixels.
    Live,
}

impl Detail {
    /// Bins of a series.
    pub(crate) fn bins(self) -> usize {
        match self {
            Detail::File => 5000,
            Detail::Live => 1000,
        }
    }
}

/// The points of a series that are shown: all if they are few, else the smallest and the largest of each of `bins` bins, the
/// first and the last. A number that is not finite is a gap, and a bin that has one keeps it.
pub fn thin(x: &[f64], y: &[f64], bins: usize) -> (Vec<f64>, Vec<Option<f64>>) {
    let point = |i: usize| (rounded(x[i]), Some(rounded(y[i])).filter(|y| y.is_finite()));
    if x.len() <= 2 * bins {
        return (0..x.len()).map(point).unzip();
    }
    let mut kept = vec![0];
    for bin in 0..bins {
        let range = bin * x.len() / bins..(bin + 1) * x.len() / bins;
        let finite = || range.clone().filter(|&i| y[i].is_finite());
        let by = |a: &usize, b: &usize| y[*a].total_cmp(&y[*b]);
        let mut chosen: Vec<usize> =
            [finite().min_by(by), finite().max_by(by), range.clone().find(|&i| !y[i].is_finite())]
                .into_iter()
                .flatten()
                .collect();
        chosen.sort_unstable();
        kept.extend(chosen);
    }
    kept.push(x.len() - 1);
    kept.dedup();
    kept.into_iter().map(point).unzip()
}

/// The means of `bins` parts of a series that [`thin`] would shorten; nothing if it would not.
pub fn means(x: &[f64], y: &[f64], bins: usize) -> Means {
    if x.len() <= 2 * bins {
        return Means::default();
    }
    let mean = |bin: usize| {
        let range = bin * x.len() / bins..(bin + 1) * x.len() / bins;
        let finite = || y[range.clone()].iter().filter(|y| y.is_finite());
        let count = finite().count();
        let mean = (count > 0).then(|| rounded(finite().sum::<f64>() / count as f64));
        (rounded(f64::midpoint(x[range.start], x[range.end - 1])), mean)
    };
    let (x, y) = (0..bins).map(mean).unzip();
    Means { x, y }
}

/// Seven significant digits: more than a screen shows, and a third of the bytes.
pub fn rounded(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() || (value.fract() == 0.0 && value.abs() < 1e15) {
        return value;
    }
    let power = 10_f64.powi(6 - value.abs().log10().floor() as i32);
    if power.is_finite() && power > 0.0 { (value * power).round() / power } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spikes_and_gaps_stay() {
        let x: Vec<f64> = (0..1_000_000).map(f64::from).collect();
        let mut y: Vec<f64> = x.iter().map(|x| (x / 1000.0).sin()).collect();
        y[345_678] = 99.0;
        y[345_679] = -99.0;
        y[777_777] = f64::NAN;
        let (kept_x, kept_y) = thin(&x, &y, 2000);
        assert!(kept_x.len() <= 2 * 2000 + 3, "{}", kept_x.len());
        assert!(kept_x.is_sorted());
        assert_eq!((kept_x[0], kept_x[kept_x.len() - 1]), (0.0, 999_999.0));
        let found = |value: f64| kept_y.iter().position(|&y| y == Some(value)).map(|i| kept_x[i]);
        assert_eq!((found(99.0), found(-99.0)), (Some(345_678.0), Some(345_679.0)));
        assert_eq!(kept_y.iter().position(Option::is_none).map(|i| kept_x[i]), Some(777_777.0));
    }

    #[test]
    fn the_mean_of_a_part_is_of_all_its_steps() {
        let x: Vec<f64> = (0..1000).map(f64::from).collect();
        let mut y = vec![1.0; 1000];
        // The smallest and the largest of the bin are 1 and 101; their middle is not the mean.
        y[5] = 101.0;
        y[6] = f64::NAN;
        let found = means(&x, &y, 100);
        assert_eq!((found.x.len(), found.x[0], found.y[1]), (100, 4.5, Some(1.0)));
        assert_eq!(found.y[0], Some(rounded(109.0 / 9.0)));
        assert_eq!(means(&x, &y, 500), Means::default(), "a series with all its points needs no means");
    }

    #[test]
    fn few_points_stay_as_they_are() {
        assert_eq!(thin(&[1.0, 2.0], &[0.123_456_789, f64::NAN], 10).1, [Some(0.123_456_8), None]);
        assert_eq!(thin(&[1.0], &[123_456_789.5], 10).1, [Some(123_456_800.0)]);
    }
}
