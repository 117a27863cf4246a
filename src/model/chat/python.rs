//! Values as Python writes them: `str`, `repr`, `json.dumps`, and `%`.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

use super::bounds::Text;

/// What cannot be done.
pub(super) fn failed(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// Writes `str(value)`; of what is undefined nothing.
pub(super) fn write_str(out: &mut Text, value: &Value) -> Result<(), Error> {
    match (value.as_str(), value.is_undefined()) {
        (Some(text), _) => out.push(text),
        (None, true) => Ok(()),
        (None, false) => write_repr(out, value, 0),
    }
}

/// Writes `repr(value)`, which stands at this depth.
fn write_repr(out: &mut Text, value: &Value, depth: usize) -> Result<(), Error> {
    out.check_depth(depth)?;
    if let Some(text) = value.as_str() {
        return write_quoted(out, text);
    }
    match value.kind() {
        ValueKind::Undefined => out.push("Undefined"),
        ValueKind::None => out.push("None"),
        ValueKind::Bool => out.push(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push(&number(value, ["inf", "-inf", "nan"])),
        ValueKind::Seq | ValueKind::Iterable => {
            out.push("[")?;
            for (i, item) in value.try_iter()?.enumerate() {
                out.push(if i > 0 { ", " } else { "" })?;
                write_repr(out, &item, depth + 1)?;
            }
            out.push("]")
        }
        ValueKind::Map => {
            out.push("{")?;
            for (i, key) in value.try_iter()?.enumerate() {
                out.push(if i > 0 { ", " } else { "" })?;
                write_repr(out, &key, depth + 1)?;
                out.push(": ")?;
                write_repr(out, &value.get_item(&key)?, depth + 1)?;
            }
            out.push("}")
        }
        _ => out.push(&value.to_string()),
    }
}

/// Writes a text between quotation marks: single ones, unless there are such and no double ones in it.
fn write_quoted(out: &mut Text, text: &str) -> Result<(), Error> {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push(quote);
    for c in text.chars() {
        match c {
            '\\' => quoted += "\\\\",
            '\n' => quoted += "\\n",
            '\r' => quoted += "\\r",
            '\t' => quoted += "\\t",
            c if c == quote => quoted.extend(['\\', c]),
            c if c.is_control() && u32::from(c) < 0x100 => quoted += &format!("\\x{:02x}", u32::from(c)),
            // Separators and marks without a picture of their own.
            '\u{a0}' | '\u{ad}' => quoted += &format!("\\x{:02x}", u32::from(c)),
            '\u{2028}' | '\u{2029}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{feff}' | '\u{3000}' => {
                quoted += &format!("\\u{:04x}", u32::from(c));
            }
            c => quoted.push(c),
        }
    }
    quoted.push(quote);
    out.push(&quoted)
}

/// A number; infinities and what is no number are spelled as told.
fn number(value: &Value, [inf, minus_inf, nan]: [&str; 3]) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(number) = f64::try_from(value.clone()) else { return value.to_string() };
    if number.is_nan() {
        nan.to_owned()
    } else if number.is_infinite() {
        if number > 0.0 { inf } else { minus_inf }.to_owned()
    } else if number != 0.0 && !(1e-4..1e16).contains(&number.abs()) {
        let text = format!("{number:e}");
        let (digits, exponent) = text.split_once('e').expect("an exponent was asked for");
        let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |exponent| ('-', exponent));
        format!("{digits}e{sign}{exponent:0>2}")
    } else if number.fract() == 0.0 {
        format!("{number:.1}")
    } else {
        number.to_string()
    }
}

/// How JSON is written, as transformers' `tojson` takes it.
pub(super) struct Json {
    /// Whether everything but ASCII is escaped.
    pub ascii: bool,
    /// Blanks for each level; without it all stands in a line.
    pub indent: Option<usize>,
    /// What stands between items, and behind a key.
    pub separators: (String, String),
    /// Whether keys are sorted.
    pub sorted: bool,
}

impl Json {
    /// Writes `json.dumps(value)`, which stands at this depth.
    pub(super) fn write(&self, out: &mut Text, value: &Value, depth: usize) -> Result<(), Error> {
        out.check_depth(depth)?;
        if let Some(text) = value.as_str() {
            return self.write_text(out, text);
        }
        match value.kind() {
            ValueKind::None => out.push("null"),
            ValueKind::Bool => out.push(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push(&number(value, ["Infinity", "-Infinity", "NaN"])),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.write_items(out, ["[", "]"], &items, depth, |out, item| self.write(out, item, depth + 1))
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sorted {
                    keys.sort();
                }
                self.write_items(out, ["{", "}"], &keys, depth, |out, key| {
                    match key.as_str() {
                        Some(text) => self.write_text(out, text)?,
                        None if matches!(key.kind(), ValueKind::None | ValueKind::Bool | ValueKind::Number) => {
                            out.push("\"")?;
                            self.write(out, key, depth + 1)?;
                            out.push("\"")?;
                        }
                        None => return Err(failed("a key of JSON is neither a text nor a number")),
                    }
                    out.push(&self.separators.1)?;
                    self.write(out, &value.get_item(key)?, depth + 1)
                })
            }
            kind => Err(failed(format!("a value of kind {kind} cannot be written as JSON"))),
        }
    }

    fn write_items(
        &self,
        out: &mut Text,
        [begin, end]: [&str; 2],
        items: &[Value],
        depth: usize,
        mut write: impl FnMut(&mut Text, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let line = |out: &mut Text, depth: usize| match self.indent {
            Some(indent) => out.push("\n").and_then(|()| out.blanks(indent.saturating_mul(depth))),
            None => Ok(()),
        };
        out.push(begin)?;
        for (i, item) in items.iter().enumerate() {
            out.push(if i > 0 { &self.separators.0 } else { "" })?;
            line(out, depth + 1)?;
            write(out, item)?;
        }
        if !items.is_empty() {
            line(out, depth)?;
        }
        out.push(end)
    }

    fn write_text(&self, out: &mut Text, text: &str) -> Result<(), Error> {
        let mut quoted = String::with_capacity(text.len() + 2);
        quoted.push('"');
        for c in text.chars() {
            match c {
                '"' => quoted += "\\\"",
                '\\' => quoted += "\\\\",
                '\n' => quoted += "\\n",
                '\r' => quoted += "\\r",
                '\t' => quoted += "\\t",
                '\u{8}' => quoted += "\\b",
                '\u{c}' => quoted += "\\f",
                c if u32::from(c) < 0x20 => quoted += &format!("\\u{:04x}", u32::from(c)),
                c if self.ascii && !(' '..='~').contains(&c) => {
                    c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| quoted += &format!("\\u{unit:04x}"));
                }
                c => quoted.push(c),
            }
        }
        quoted.push('"');
        out.push(&quoted)
    }
}

/// A directive of `%`: `-`, `0`, width, digits behind the point, and the letter.
struct Directive {
    left: bool,
    zeros: bool,
    width: usize,
    precision: Option<usize>,
    letter: char,
}

/// The pieces of a format: text, and directives between.
fn directives(format: &str) -> Result<Vec<(String, Option<Directive>)>, Error> {
    let (mut pieces, mut text, mut rest) = (Vec::new(), String::new(), format);
    while let Some((before, after)) = rest.split_once('%') {
        text += before;
        let end = after.find(|c: char| !matches!(c, '-' | '.' | '0'..='9'));
        let Some(letter) = end.and_then(|end| after[end..].chars().next()) else {
            return Err(failed("the format ends within a directive"));
        };
        let flags = &after[..end.unwrap_or_default()];
        rest = &after[flags.len() + letter.len_utf8()..];
        if letter == '%' && flags.is_empty() {
            text.push('%');
            continue;
        }
        let unknown = || failed(format!("`%{flags}{letter}` is not written here: %s, %r, %d, %i, %f and %x are"));
        if !matches!(letter, 's' | 'r' | 'd' | 'i' | 'f' | 'x') {
            return Err(unknown());
        }
        let (left, digits) = flags.strip_prefix('-').map_or((false, flags), |digits| (true, digits));
        let (width, precision) = digits.split_once('.').map_or((digits, None), |(w, p)| (w, Some(p)));
        let read = |digits: &str| match digits {
            "" => Ok(0),
            digits => digits.parse().ok().filter(|&width| width <= MAX_WIDTH).ok_or_else(unknown),
        };
        let directive = Directive {
            left,
            zeros: width.starts_with('0'),
            width: read(width)?,
            precision: precision.map(read).transpose()?,
            letter,
        };
        pieces.push((std::mem::take(&mut text), Some(directive)));
    }
    pieces.push((text + rest, None));
    Ok(pieces)
}

/// Widest field, in characters.
const MAX_WIDTH: usize = 1000;

/// Writes `format % arguments`. A list stands for a tuple, as a template writes both alike, unless there is one directive.
pub(super) fn write_percent(out: &mut Text, format: &str, argument: &Value) -> Result<(), Error> {
    let pieces = directives(format)?;
    let wanted = pieces.iter().filter(|(_, directive)| directive.is_some()).count();
    let is_list = argument.kind() == ValueKind::Seq;
    let arguments: Vec<Value> = match (is_list, wanted) {
        (true, 1) if argument.len() == Some(1) => {
            return Err(failed("% with a list of one: it may be a list or a tuple"));
        }
        (true, 1) | (false, _) => vec![argument.clone()],
        (true, _) => argument.try_iter()?.collect(),
    };
    if arguments.len() != wanted {
        return Err(failed(format!("the format wants {wanted} values, {} are given", arguments.len())));
    }
    write_pieces(out, &pieces, &arguments)
}

/// Writes what `'…'|format(…)` says.
pub(super) fn write_format(out: &mut Text, format: &str, arguments: &[Value]) -> Result<(), Error> {
    let pieces = directives(format)?;
    let wanted = pieces.len() - 1;
    match arguments.len() == wanted {
        true => write_pieces(out, &pieces, arguments),
        false => Err(failed(format!("the format wants {wanted} values, {} are given", arguments.len()))),
    }
}

fn write_pieces(out: &mut Text, pieces: &[(String, Option<Directive>)], arguments: &[Value]) -> Result<(), Error> {
    let mut arguments = arguments.iter();
    for (text, directive) in pieces {
        out.push(text)?;
        if let (Some(directive), Some(argument)) = (directive, arguments.next().filter(|_| directive.is_some())) {
            directive.write(out, argument)?;
        }
    }
    Ok(())
}

impl Directive {
    fn write(&self, out: &mut Text, value: &Value) -> Result<(), Error> {
        let is_number = matches!(value.kind(), ValueKind::Number | ValueKind::Bool);
        let float = || f64::try_from(value.clone()).ok().filter(|_| is_number);
        let wrong = || failed(format!("%{} of a value of kind {}", self.letter, value.kind()));
        let mut text = match self.letter {
            's' | 'r' => {
                let mut part = Text::default();
                if self.letter == 's' { write_str(&mut part, value) } else { write_repr(&mut part, value, 0) }?;
                part.into_text()
            }
            'f' => format!("{:.*}", self.precision.unwrap_or(6), float().ok_or_else(wrong)?),
            letter => {
                let number = match i128::try_from(value.clone()) {
                    Ok(number) if is_number => number,
                    _ if letter == 'x' => return Err(wrong()),
                    _ => float().filter(|number| number.is_finite()).ok_or_else(wrong)?.trunc() as i128,
                };
                let digits = match letter {
                    'x' => format!("{:x}", number.unsigned_abs()),
                    _ => number.unsigned_abs().to_string(),
                };
                format!("{}{digits:0>1$}", if number < 0 { "-" } else { "" }, self.precision.unwrap_or(0))
            }
        };
        if let (Some(precision), 's' | 'r') = (self.precision, self.letter) {
            text = text.chars().take(precision).collect();
        }
        let missing = self.width.saturating_sub(text.chars().count());
        if self.left {
            text.extend(std::iter::repeat_n(' ', missing));
        } else if self.zeros && !matches!(self.letter, 's' | 'r') {
            let sign = usize::from(text.starts_with('-'));
            text.insert_str(sign, &"0".repeat(missing));
        } else {
            text.insert_str(0, &" ".repeat(missing));
        }
        out.push(&text)
    }
}
