//! Lines of cells for people, one below the other.

/// How wide each column is.
pub(crate) struct Columns(Vec<usize>);

impl Columns {
    /// Wide enough for these lines. What comes later is set likewise.
    pub(crate) fn of<'l>(lines: impl IntoIterator<Item = &'l [String]>) -> Self {
        let mut widths = Vec::new();
        for line in lines {
            widths.resize(line.len().max(widths.len()), 0);
            for (width, cell) in widths.iter_mut().zip(line) {
                *width = cell.chars().count().max(*width);
            }
        }
        Self(widths)
    }

    pub(crate) fn line(&self, cells: &[String]) -> String {
        let cells = cells.iter().zip(&self.0);
        let padded: Vec<_> = cells
            .map(|(cell, width)| format!("{cell:width$}"))
            .collect();
        padded.join("   ").trim_end().to_owned()
    }
}
