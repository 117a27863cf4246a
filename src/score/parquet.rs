//! Rows of Parquet files.

use std::fs::File;
use std::path::Path;

use parquet::errors::ParquetError;
use parquet::file::reader::SerializedFileReader;
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row as ParquetRow};
use serde_json::Value;

use super::import::Row;
use crate::error::{Fault, FaultKind, Place, Result};

/// How a Parquet file begins.
pub const MAGIC: &[u8; 4] = b"PAR1";

/// The rows of a Parquet file, one at a time.
pub fn rows(path: &Path) -> Result<impl Iterator<Item = Result<Row>> + use<>> {
    let file = File::open(path).map_err(|e| Fault::io("open the file", path, e))?;
    let place = Place::file(path);
    let fault = move |e: ParquetError| Fault::new(place.clone(), FaultKind::ParquetSyntax { message: e.to_string() });
    let reader = SerializedFileReader::new(file).map_err(&fault)?;
    let rows = RowIter::from_file_into(Box::new(reader));
    Ok(rows.map(move |row| row.map(|row| object(&row)).map_err(&fault)))
}

fn object(row: &ParquetRow) -> Row {
    row.get_column_iter().map(|(name, field)| (name.clone(), value(field))).collect()
}

/// A field as JSON. What no task has (bytes, dates, decimals) becomes its text.
fn value(field: &Field) -> Value {
    match field {
        Field::Null => Value::Null,
        Field::Bool(value) => (*value).into(),
        Field::Byte(value) => (*value).into(),
        Field::Short(value) => (*value).into(),
        Field::Int(value) => (*value).into(),
        Field::Long(value) => (*value).into(),
        Field::UByte(value) => (*value).into(),
        Field::UShort(value) => (*value).into(),
        Field::UInt(value) => (*value).into(),
        Field::ULong(value) => (*value).into(),
        Field::Float(value) => (*value).into(),
        Field::Double(value) => (*value).into(),
        Field::Str(text) => text.as_str().into(),
        Field::Group(row) => Value::Object(object(row)),
        Field::ListInternal(list) => list.elements().iter().map(value).collect(),
        other => other.to_string().into(),
    }
}
