//! Tables in text: plain columns, no colour, no lines.

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

/// A table with a header; the columns named in `right` are aligned to the right.
pub(crate) fn table(header: &[&str], right: &[&str], rows: Vec<Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header.iter().copied());
    for row in rows {
        table.add_row(row);
    }
    let last = header.len() - 1;
    for (i, name) in header.iter().enumerate() {
        if let Some(column) = table.column_mut(i) {
            column.set_padding((0, if i == last { 0 } else { 2 }));
            if right.contains(name) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
    }
    let lines: Vec<String> = table.to_string().lines().map(|line| line.trim_end().to_owned()).collect();
    lines.join("\n") + "\n"
}

/// Columns that text keeps to where it can.
const COLUMNS: usize = 80;

/// Parts joined by commas, on further lines where one does not take them.
pub(crate) fn wrapped(parts: &[String]) -> String {
    let mut out = String::new();
    let mut width = 0;
    for (i, part) in parts.iter().enumerate() {
        let length = part.chars().count() + 1;
        if i > 0 {
            let fits = width + 1 + length <= COLUMNS;
            out += if fits { ", " } else { ",\n  " };
            width = if fits { width + 1 } else { 2 };
        }
        out += part;
        width += length;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::wrapped;

    #[test]
    fn long_lists_go_on_below() {
        let parts: Vec<String> = (0..8).map(|i| format!("part number {i}")).collect();
        let text = wrapped(&parts);
        assert!(text.lines().count() == 2 && text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert_eq!(text.replace(",\n  ", ", "), parts.join(", "));
        assert_eq!(wrapped(&[]), "");
    }
}
