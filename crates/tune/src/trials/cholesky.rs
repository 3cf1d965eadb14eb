//! The Cholesky factor of a symmetric positive matrix, and solves with it.

/// A lower triangular matrix `l`, so that `l · lᵀ` is the factored matrix. Row by row.
#[derive(Clone, Debug)]
pub struct Cholesky {
    size: usize,
    l: Vec<f64>,
}

impl Cholesky {
    /// Factors the symmetric matrix `a` of `size` rows, whose lower triangle is read. `None` if it is not positive definite.
    pub fn new(mut a: Vec<f64>, size: usize) -> Option<Self> {
        for i in 0..size {
            let (above, from) = a.split_at_mut(i * size);
            let row = &mut from[..size];
            for j in 0..i {
                let other = &above[j * size..][..=j];
                row[j] = (row[j] - dot(&row[..j], &other[..j])) / other[j];
            }
            let diagonal = row[i] - dot(&row[..i], &row[..i]);
            if diagonal.is_nan() || diagonal <= 0.0 {
                return None;
            }
            row[i] = diagonal.sqrt();
        }
        Some(Cholesky { size, l: a })
    }

    /// The logarithm of the determinant of the factored matrix.
    pub fn log_determinant(&self) -> f64 {
        2.0 * (0..self.size).map(|i| self.l[i * self.size + i].ln()).sum::<f64>()
    }

    /// Solves `l · x = b`.
    pub fn forward(&self, b: &[f64]) -> Vec<f64> {
        let mut x = b.to_vec();
        for i in 0..self.size {
            let row = &self.l[i * self.size..][..=i];
            x[i] = (x[i] - dot(&row[..i], &x[..i])) / row[i];
        }
        x
    }

    /// Solves `l · lᵀ · x = b`.
    pub fn solve(&self, b: &[f64]) -> Vec<f64> {
        let mut x = self.forward(b);
        for i in (0..self.size).rev() {
            let row = &self.l[i * self.size..][..=i];
            x[i] /= row[i];
            let found = x[i];
            for (x, l) in x[..i].iter_mut().zip(row) {
                *x -= l * found;
            }
        }
        x
    }
}

/// The sum of products, in four parts so that the compiler can use vector instructions.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 4];
    let (mut left, mut right) = (a.chunks_exact(4), b.chunks_exact(4));
    for (a, b) in left.by_ref().zip(right.by_ref()) {
        for i in 0..4 {
            sums[i] += a[i] * b[i];
        }
    }
    let rest: f64 = left.remainder().iter().zip(right.remainder()).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f64>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_known_matrix_is_factored_and_solved() {
        let a = vec![4.0, 0.0, 0.0, 12.0, 37.0, 0.0, -16.0, -43.0, 98.0];
        let factor = Cholesky::new(a, 3).expect("it is positive definite");
        let lower = [2.0, 6.0, 1.0, -8.0, 5.0, 3.0];
        let at = |i: usize, j: usize| factor.l[i * 3 + j];
        for (found, expected) in
            [at(0, 0), at(1, 0), at(1, 1), at(2, 0), at(2, 1), at(2, 2)].iter().zip(lower)
        {
            assert!((found - expected).abs() < 1e-12, "{found} {expected}");
        }
        assert!((factor.log_determinant() - 36.0_f64.ln()).abs() < 1e-12);
        // The matrix times (1, 2, 3) is (−20, −43, 192).
        let solved = factor.solve(&[-20.0, -43.0, 192.0]);
        assert!(solved.iter().zip([1.0, 2.0, 3.0]).all(|(x, y)| (x - y).abs() < 1e-10), "{solved:?}");
    }

    #[test]
    fn a_matrix_that_is_not_positive_is_refused() {
        assert!(Cholesky::new(vec![1.0, 0.0, 2.0, 1.0], 2).is_none());
        assert!(Cholesky::new(vec![f64::NAN], 1).is_none());
    }

    #[test]
    fn a_sum_of_products_has_every_term() {
        let a: Vec<f64> = (1..=7).map(f64::from).collect();
        assert!((dot(&a, &a) - 140.0).abs() < 1e-12);
    }
}
