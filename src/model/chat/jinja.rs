//! Jinja as transformers renders it, within the bounds of [`super::bounds`].
//!
//! A template is compiled by minijinja. Of its instructions those that make values (`~`, `+`, `*`, `%`, slices) or compare
//! them then become calls of the functions here, which pay before they do; filters, tests and methods are called through
//! functions that do the same. What cannot be bounded so (unpacked argument lists, chained comparisons) is refused. What stands
//! between constants alone is computed by minijinja while it compiles, where nothing can double.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use chrono::{DateTime, Local};
use minijinja::machinery::{
    CodeGenerator, Instruction, Instructions, Token, Vm, WhitespaceConfig, make_string_output, parse, tokenize,
};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, context};

use super::bounds::{self, Text, made, pay, weight};
use super::python::{Json, failed, write_format, write_percent, write_str};
use crate::limits;

/// Blocks take the line end after them and the blanks before them along.
const WHITESPACE: WhitespaceConfig =
    WhitespaceConfig { keep_trailing_newline: false, lstrip_blocks: true, trim_blocks: true };
/// Filters that make no more than a few times what they are given.
const FILTERS: [&str; 37] = [
    "abs",
    "attr",
    "bool",
    "capitalize",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "first",
    "float",
    "groupby",
    "int",
    "items",
    "last",
    "length",
    "lines",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "sort",
    "split",
    "title",
    "trim",
    "unique",
    "upper",
    "zip",
];
/// Filters that could make much of little: these are written here.
const OWN_FILTERS: [&str; 6] = ["format", "indent", "join", "replace", "string", "tojson"];
const TESTS: [&str; 34] = [
    "!=",
    "<",
    "<=",
    "==",
    ">",
    ">=",
    "boolean",
    "defined",
    "divisibleby",
    "endingwith",
    "eq",
    "equalto",
    "even",
    "false",
    "float",
    "ge",
    "greaterthan",
    "gt",
    "in",
    "int",
    "integer",
    "iterable",
    "le",
    "lessthan",
    "lower",
    "lt",
    "mapping",
    "ne",
    "none",
    "number",
    "odd",
    "sequence",
    "startingwith",
    "string",
];
const MORE_TESTS: [&str; 4] = ["sameas", "true", "undefined", "upper"];
/// Operators, as the functions are called that stand in for them; no template can name one.
const OPERATORS: [(&str, &str); 8] = [
    ("==", "a == b"),
    ("!=", "a != b"),
    ("<", "a < b"),
    ("<=", "a <= b"),
    (">", "a > b"),
    (">=", "a >= b"),
    ("in", "a in b"),
    ("[:]", "a[b:c:d]"),
];
/// Products of constants that minijinja forms while it compiles, 100 MB each at most.
const MAX_CONSTANT_PRODUCTS: usize = 2;
/// Stack of the thread that renders, in bytes; pages that are not used are not there.
const STACK_BYTES: usize = 512 << 20;

/// Renders a template in a thread of its own, whose stack takes whatever nests.
pub(super) fn render(
    source: &str,
    context: &BTreeMap<String, Value>,
    now: DateTime<Local>,
    bytes: u64,
) -> Result<String, Failure> {
    let work = || {
        bounds::begin(bytes);
        // An error may hold values, which nest: it stays here.
        rendered(source, context, now, bytes).map_err(|error| Failure::of(&error))
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, work);
        let thread = thread.map_err(|e| Failure { line: None, message: format!("no thread to render it: {e}") })?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Why a template fails.
pub(super) struct Failure {
    pub(super) line: Option<usize>,
    pub(super) message: String,
}

impl Failure {
    fn of(error: &Error) -> Failure {
        let mut message = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
        let mut line = error.line();
        // What is wrong deep inside, for one of a macro, comes with its own line.
        let mut cause = std::error::Error::source(error);
        while let Some(source) = cause {
            match source.downcast_ref::<Error>() {
                Some(inner) => {
                    message = inner.detail().map_or_else(|| inner.kind().to_string(), str::to_owned);
                    line = inner.line().or(line);
                }
                None => message = source.to_string(),
            }
            cause = source.source();
        }
        Failure { line, message }
    }
}

fn rendered(
    source: &str,
    context: &BTreeMap<String, Value>,
    now: DateTime<Local>,
    bytes: u64,
) -> Result<String, Error> {
    if source.len() as u64 > limits::MAX_TEMPLATE_SOURCE_BYTES {
        let limit = limits::MAX_TEMPLATE_SOURCE_BYTES;
        return Err(failed(format!("it has {} bytes, at most {limit} are read", source.len())));
    }
    check_constants(source)?;
    let name = super::KEY;
    let tree = parse(source, name, SyntaxConfig, WHITESPACE)?;
    let mut generator = CodeGenerator::new(name, source);
    generator.compile_stmt(&tree);
    let (mut instructions, mut blocks) = generator.finish();
    let mut longest = stand_in(&mut instructions)?;
    for block in blocks.values_mut() {
        longest = longest.max(stand_in(block)?);
    }
    let mut environment = environment(now);
    // Each step can print a piece of the template's own text.
    let steps = (bytes / longest.max(1)).min(limits::MAX_TEMPLATE_STEPS);
    environment.set_debug(false);
    environment.set_fuel(Some(steps));
    let mut text = String::new();
    let root = Value::from_iter(context.clone());
    let vm = Vm::new(&environment);
    let run = vm.eval(&instructions, root, &blocks, &mut make_string_output(&mut text), AutoEscape::None);
    run.map(drop)?;
    match text.len() as u64 > limits::MAX_PROMPT_BYTES {
        true => Err(failed(format!("the prompt has more than {} bytes", limits::MAX_PROMPT_BYTES))),
        false => Ok(text),
    }
}

/// Refuses templates in which more than a few constants are multiplied: that happens before anything can be counted.
fn check_constants(source: &str) -> Result<(), Error> {
    let tokens = tokenize(source, false, SyntaxConfig, WHITESPACE);
    // What does not tokenize does not parse either, which is told then.
    let tokens: Vec<Token<'_>> = tokens.map_while(|token| token.ok().map(|(token, _)| token)).collect();
    let is_constant = |token: &Token<'_>| !matches!(token, Token::Ident(_));
    let products = tokens.windows(3).filter(|window| matches!(window[1], Token::Mul));
    let constants = products.filter(|window| is_constant(&window[0]) && is_constant(&window[2])).count();
    match constants > MAX_CONSTANT_PRODUCTS {
        true => Err(failed(format!("it multiplies constants more than {MAX_CONSTANT_PRODUCTS} times"))),
        false => Ok(()),
    }
}

/// Puts calls in the place of operators; the length of the longest piece of text that is printed as it is.
fn stand_in(instructions: &mut Instructions<'_>) -> Result<u64, Error> {
    let mut longest = 0;
    for at in 0..instructions.len() as u32 {
        let line = instructions.get_line(at);
        let Some(instruction) = instructions.get_mut(at) else { break };
        let (name, arguments) = match instruction {
            Instruction::StringConcat => ("~", 2),
            Instruction::Add => ("+", 2),
            Instruction::Mul => ("*", 2),
            Instruction::Rem => ("%", 2),
            Instruction::Slice => ("[:]", 4),
            Instruction::In => ("in", 2),
            Instruction::Eq => ("==", 2),
            Instruction::Ne => ("!=", 2),
            Instruction::Lt => ("<", 2),
            Instruction::Lte => ("<=", 2),
            Instruction::Gt => (">", 2),
            Instruction::Gte => (">=", 2),
            Instruction::EmitRaw(text) => {
                longest = longest.max(text.len() as u64);
                continue;
            }
            Instruction::UnpackLists(_) | Instruction::MergeKwargs(_) => return Err(refused("*arguments", line)),
            Instruction::CompareAndPreserve(_) => return Err(refused("a comparison of three values", line)),
            _ => continue,
        };
        *instruction = Instruction::CallFunction(name, Some(arguments));
    }
    Ok(longest)
}

fn refused(what: &str, line: Option<usize>) -> Error {
    let line = line.map_or(String::new(), |line| format!(" in line {line}"));
    failed(format!("{what}{line}: a template is rendered without that"))
}

/// What a template can call, each function paying for what it makes.
fn environment(now: DateTime<Local>) -> Environment<'static> {
    let mut environment = Environment::empty();
    for name in FILTERS.into_iter().chain(OWN_FILTERS) {
        environment.add_filter(name, move |arguments: Rest<Value>| {
            check(&arguments)?;
            made(PLAIN.empty_state().apply_filter(name, &arguments)?)
        });
    }
    for name in TESTS.into_iter().chain(MORE_TESTS) {
        environment.add_test(name, move |arguments: Rest<Value>| {
            check(&arguments)?;
            PLAIN.empty_state().perform_test(name, &arguments)
        });
    }
    for (name, expression) in OPERATORS {
        environment.add_function(name, move |arguments: Rest<Value>| {
            check(&arguments)?;
            made(operate(expression, &arguments)?)
        });
    }
    environment
        .add_function("~", |a: Value, b: Value| written(|out| write_str(out, &a).and_then(|()| write_str(out, &b))));
    environment.add_function("+", add);
    environment.add_function("*", multiply);
    environment.add_function("%", remainder);
    for name in ["range", "dict", "namespace"] {
        environment.add_function(name, move |state: &State, arguments: Rest<Value>| {
            check(&arguments)?;
            let function = PLAIN.globals().find(|(known, _)| *known == name).map(|(_, function)| function);
            function.ok_or_else(|| failed(format!("{name} is unknown")))?.call(state, &arguments)
        });
    }
    environment.add_function("raise_exception", |message: Value| -> Result<String, Error> {
        weight(&message)?;
        Err(failed(string(&message)?.to_string()))
    });
    environment.add_function("strftime_now", move |format: &str| time(&now, format));
    environment.set_unknown_method_callback(method);
    environment.set_formatter(|out, _, value| {
        let text = string(value)?;
        out.write_str(text.as_str().unwrap_or_default()).map_err(Error::from)
    });
    environment
}

/// What does the work: minijinja's own functions, but for those that could make much of little.
static PLAIN: LazyLock<Environment<'static>> = LazyLock::new(|| {
    let mut plain = Environment::new();
    for name in ["batch", "chain", "pprint", "slice", "sum", "urlencode"] {
        plain.remove_filter(name);
    }
    plain.set_unknown_method_callback(method);
    plain.add_filter("string", |value: Value| string(&value));
    plain.add_filter("join", |items: Value, between: Option<Value>| join(&items, between.as_ref()));
    plain.add_filter("replace", |text: Value, old: Value, new: Value, count: Option<usize>| {
        replace(&text, &old, &new, count)
    });
    plain.add_filter("indent", indent);
    plain.add_filter("tojson", to_json);
    plain.add_filter("format", |format: Value, arguments: Rest<Value>| {
        let format = string(&format)?;
        written(|out| write_format(out, format.as_str().unwrap_or_default(), &arguments))
    });
    plain
});

/// Refuses arguments that would be too long if they were written out.
fn check(arguments: &[Value]) -> Result<(), Error> {
    arguments.iter().try_for_each(|argument| weight(argument).map(drop))
}

/// A text, by what writes it.
fn written(write: impl FnOnce(&mut Text) -> Result<(), Error>) -> Result<Value, Error> {
    let mut text = Text::default();
    write(&mut text)?;
    Ok(Value::from(text.into_text()))
}

/// `str(value)`.
fn string(value: &Value) -> Result<Value, Error> {
    written(|out| write_str(out, value))
}

/// What minijinja makes of an expression of `a`, `b`, `c` and `d`.
fn operate(expression: &'static str, arguments: &[Value]) -> Result<Value, Error> {
    let of = |at: usize| arguments.get(at).cloned().unwrap_or_default();
    PLAIN.compile_expression(expression)?.eval(context! { a => of(0), b => of(1), c => of(2), d => of(3) })
}

fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

fn add(a: Value, b: Value) -> Result<Value, Error> {
    match (a.as_str(), b.as_str()) {
        (Some(one), Some(other)) => written(|out| out.push(one).and_then(|()| out.push(other))),
        _ if is_list(&a) && is_list(&b) => {
            pay(weight(&a)? + weight(&b)?)?;
            Ok(a.try_iter()?.chain(b.try_iter()?).collect())
        }
        _ => {
            check(&[a.clone(), b.clone()])?;
            operate("a + b", &[a, b])
        }
    }
}

fn multiply(a: Value, b: Value) -> Result<Value, Error> {
    let is_repeated = |value: &Value| value.as_str().is_some() || is_list(value);
    let (value, times) = if is_repeated(&a) { (&a, &b) } else { (&b, &a) };
    if !is_repeated(value) {
        return operate("a * b", &[a, b]);
    }
    let times =
        i64::try_from(times.clone()).map_err(|_| failed("a text or list is multiplied by what is no number"))?;
    let times = usize::try_from(times).unwrap_or(0);
    pay(weight(value)?.saturating_mul(times as u64))?;
    match value.as_str() {
        Some(text) => Ok(Value::from(text.repeat(times))),
        None => {
            let items: Vec<Value> = value.try_iter()?.collect();
            Ok((0..times).flat_map(|_| items.iter().cloned()).collect())
        }
    }
}

fn remainder(a: Value, b: Value) -> Result<Value, Error> {
    match a.as_str() {
        Some(format) => written(|out| write_percent(out, format, &b)),
        None => operate("a % b", &[a, b]),
    }
}

fn join(items: &Value, between: Option<&Value>) -> Result<Value, Error> {
    written(|out| {
        for (i, item) in items.try_iter()?.enumerate() {
            if let Some(between) = between.filter(|_| i > 0) {
                write_str(out, between)?;
            }
            write_str(out, &item)?;
        }
        Ok(())
    })
}

fn replace(text: &Value, old: &Value, new: &Value, count: Option<usize>) -> Result<Value, Error> {
    let (text, old, new) = (string(text)?, string(old)?, string(new)?);
    let of = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (text, old, new) = (of(&text), of(&old), of(&new));
    let times = text.matches(&old).count().min(count.unwrap_or(usize::MAX));
    pay((text.len() as u64).saturating_add((times as u64).saturating_mul(new.len() as u64)))?;
    Ok(Value::from(text.replacen(&old, &new, times)))
}

/// Blanks before every line but the first and empty ones, unless it is said otherwise.
fn indent(text: Value, arguments: Rest<Value>) -> Result<Value, Error> {
    let (places, kwargs): (&[Value], Kwargs) = minijinja::value::from_args(&arguments)?;
    let given = |at: usize, key: &str| -> Result<Option<Value>, Error> {
        Ok(places.get(at).cloned().or(kwargs.get::<Option<Value>>(key)?))
    };
    let width = given(0, "width")?.map_or(Ok(4), usize::try_from)?;
    let flag = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let (first, blank) = (flag(given(1, "first")?), flag(given(2, "blank")?));
    kwargs.assert_all_used()?;
    let text = string(&text)?;
    written(|out| {
        for (i, line) in text.as_str().unwrap_or_default().split('\n').enumerate() {
            out.push(if i > 0 { "\n" } else { "" })?;
            if (i > 0 || first) && (blank || !line.is_empty()) {
                out.blanks(width)?;
            }
            out.push(line)?;
        }
        Ok(())
    })
}

/// `tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`
fn to_json(value: Value, arguments: Rest<Value>) -> Result<Value, Error> {
    let (places, kwargs): (&[Value], Kwargs) = minijinja::value::from_args(&arguments)?;
    let given = |at: usize, key: &str| -> Result<Option<Value>, Error> {
        let value = places.get(at).cloned().or(kwargs.get::<Option<Value>>(key)?);
        Ok(value.filter(|value| !value.is_none()))
    };
    let flag = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let ascii = flag(given(0, "ensure_ascii")?);
    let indent = given(1, "indent")?.map(usize::try_from).transpose()?;
    let separators = match given(2, "separators")? {
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
        Some(pair) => {
            let text = |at: usize| pair.get_item_by_index(at).map(|text| text.as_str().unwrap_or_default().to_owned());
            (text(0)?, text(1)?)
        }
    };
    let json = Json { ascii, indent, separators, sorted: flag(given(3, "sort_keys")?) };
    kwargs.assert_all_used()?;
    written(|out| json.write(out, &value, 0))
}

/// The time as `strftime` writes it.
fn time(now: &DateTime<Local>, format: &str) -> Result<Value, Error> {
    let mut text = String::new();
    std::fmt::write(&mut text, format_args!("{}", now.format(format)))
        .map_err(|_| failed(format!("strftime_now does not know `{format}`")))?;
    made(Value::from(text))
}

/// Python's methods of texts, lists and dicts.
fn method(state: &State, value: &Value, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    check(arguments)?;
    weight(value)?;
    match (value.as_str(), name, arguments) {
        (Some(_), "replace", [old, new]) => replace(value, old, new, None),
        (Some(_), "replace", [old, new, count]) => replace(value, old, new, usize::try_from(count.clone()).ok()),
        (Some(_), "join", [items]) => join(items, Some(value)),
        // Its widths have no bound.
        (Some(_), "format", _) => Err(Error::new(ErrorKind::UnknownMethod, "format is not a method here: use % or ~")),
        _ => made(minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments)?),
    }
}
