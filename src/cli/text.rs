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
