//! Numbers about numbers.

/// Sorted, not empty.
pub(crate) struct Sample(Vec<f64>);

impl Sample {
    /// None of nothing.
    pub(crate) fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        (!values.is_empty()).then_some(Self(values))
    }

    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn median(&self) -> f64 {
        let middle = self.0.len() / 2;
        if self.0.len().is_multiple_of(2) {
            f64::midpoint(self.0[middle - 1], self.0[middle])
        } else {
            self.0[middle]
        }
    }

    /// The smallest value that 99 of 100 do not exceed.
    pub(crate) fn p99(&self) -> f64 {
        self.0[(self.0.len() * 99).div_ceil(100) - 1]
    }

    pub(crate) fn worst(&self) -> f64 {
        self.0[self.0.len() - 1]
    }
}
