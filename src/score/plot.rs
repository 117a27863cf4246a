//! Small plots as SVG: points with intervals, and a line over positions. Colours are classes of the page's style sheet.

use std::fmt::Write;

/// Width of every plot, in user units.
const WIDTH: f64 = 680.0;
/// Space at the left for names.
const LEFT: f64 = 200.0;
const RIGHT: f64 = 24.0;
const ROW: f64 = 26.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 42.0;

/// Text as it may stand in HTML.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            c if crate::error::is_unprintable(c) && c != '\n' => out.extend(c.escape_default()),
            c => out.push(c),
        }
    }
    out
}

/// Round numbers between two values, about `count` of them.
pub fn ticks(from: f64, to: f64, count: f64) -> Vec<f64> {
    let span = to - from;
    if !(span.is_finite() && span > 0.0) {
        return vec![from];
    }
    let raw = span / count;
    let power = 10f64.powf(raw.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * power).find(|step| *step >= raw * 0.999);
    let step = step.unwrap_or(10.0 * power);
    let (first, last) = ((from / step).ceil() as i64, (to / step).floor() as i64);
    (first..=last).map(|i| i as f64 * step).collect()
}

/// A number as short as its place among ticks needs.
pub fn label(value: f64) -> String {
    let text = if value != 0.0 && value.abs() < 1e-3 { format!("{value:.1e}") } else { format!("{value:.3}") };
    match text.contains('.') && !text.contains('e') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// A name that fits beside a plot.
fn short(name: &str) -> String {
    const MOST: usize = 22;
    match name.chars().count() > MOST {
        true => {
            name.chars().take(MOST - 9).chain("…".chars()).chain(name.chars().skip(name.chars().count() - 8)).collect()
        }
        false => name.to_owned(),
    }
}

/// A point with its interval.
#[derive(Debug, Clone)]
pub struct Point {
    /// What it is.
    pub name: String,
    /// Class of its colour.
    pub class: &'static str,
    /// Where it is.
    pub value: f64,
    /// From where to where it may be.
    pub interval: Option<(f64, f64)>,
}

/// Points below each other on one axis, with vertical marks.
pub fn intervals(title: &str, points: &[Point], marks: &[(f64, &str)]) -> String {
    let ends = |point: &Point| {
        [point.value, point.interval.map_or(point.value, |i| i.0), point.interval.map_or(point.value, |i| i.1)]
    };
    let values: Vec<f64> = points.iter().flat_map(ends).chain(marks.iter().map(|mark| mark.0)).collect();
    let (least, most) = values.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), &v| (a.min(v), b.max(v)));
    let margin = ((most - least) * 0.05).max(1e-6);
    let (least, most) = (least - margin, most + margin);
    let x = |value: f64| LEFT + (value - least) / (most - least) * (WIDTH - LEFT - RIGHT);
    let height = TOP + BOTTOM + ROW * points.len() as f64;
    let mut svg = open(title, height);
    for tick in ticks(least, most, 6.0) {
        axis_tick(&mut svg, x(tick), TOP, height - BOTTOM, &label(tick));
    }
    for (value, name) in marks {
        let at = x(*value);
        let _ = write!(
            svg,
            "<line class=\"{}\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{:.1}\"/>",
            if name.is_empty() { "nil" } else { "mark" },
            height - BOTTOM
        );
        let _ = write!(svg, "<text class=\"tick\" x=\"{at:.1}\" y=\"{:.1}\">{}</text>", height - 4.0, escape(name));
    }
    for (i, point) in points.iter().enumerate() {
        let y = TOP + ROW * (i as f64 + 0.5);
        let _ = write!(
            svg,
            "<text class=\"name\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            LEFT - 10.0,
            y + 4.0,
            escape(&short(&point.name))
        );
        if let Some((low, high)) = point.interval {
            let _ = write!(
                svg,
                "<line class=\"interval {}\" x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>",
                point.class,
                x(low),
                x(high)
            );
        }
        let _ = write!(
            svg,
            "<circle class=\"point {}\" cx=\"{:.1}\" cy=\"{y:.1}\" r=\"5\"><title>{}: {}</title></circle>",
            point.class,
            x(point.value),
            escape(&point.name),
            label(point.value)
        );
    }
    svg + "</svg>"
}

/// A line through (position, value), positions on a logarithmic axis that begins at 1.
pub fn line(title: &str, points: &[(f64, f64)], x_name: &str) -> String {
    const HEIGHT: f64 = 240.0;
    const AXIS: f64 = 64.0;
    let most_x = points.iter().map(|point| point.0).fold(2.0, f64::max);
    let most_y = points.iter().map(|point| point.1).fold(0.0, f64::max).max(1e-9) * 1.05;
    let x = |value: f64| AXIS + value.ln() / most_x.ln() * (WIDTH - AXIS - RIGHT);
    let y = |value: f64| TOP + (1.0 - value / most_y) * (HEIGHT - TOP - BOTTOM);
    let mut svg = open(title, HEIGHT);
    for tick in ticks(0.0, most_y, 5.0) {
        let at = y(tick);
        let _ = write!(
            svg,
            "<line class=\"grid\" x1=\"{AXIS}\" x2=\"{:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>",
            WIDTH - RIGHT
        );
        let _ =
            write!(svg, "<text class=\"name\" x=\"{:.1}\" y=\"{:.1}\">{}</text>", AXIS - 8.0, at + 4.0, label(tick));
    }
    let decades = (0..).map(|power| 2f64.powi(power)).take_while(|value| *value <= most_x * 1.0001);
    for tick in decades {
        axis_tick(&mut svg, x(tick), HEIGHT - BOTTOM, HEIGHT - BOTTOM + 4.0, &label(tick));
    }
    let _ = write!(
        svg,
        "<text class=\"tick\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
        (WIDTH + AXIS) / 2.0,
        HEIGHT - 3.0,
        escape(x_name)
    );
    let path: Vec<String> = points.iter().map(|point| format!("{:.1},{:.1}", x(point.0), y(point.1))).collect();
    let _ = write!(svg, "<polyline class=\"curve\" points=\"{}\"/>", path.join(" "));
    for point in points {
        let _ = write!(
            svg,
            "<circle class=\"point model\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\"><title>{}: {}</title></circle>",
            x(point.0),
            y(point.1),
            label(point.0),
            label(point.1)
        );
    }
    svg + "</svg>"
}

fn open(title: &str, height: f64) -> String {
    let title = escape(title);
    format!("<svg viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\" aria-label=\"{title}\"><title>{title}</title>")
}

fn axis_tick(svg: &mut String, x: f64, from: f64, to: f64, name: &str) {
    let _ = write!(svg, "<line class=\"grid\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{from:.1}\" y2=\"{to:.1}\"/>");
    let _ = write!(svg, "<text class=\"tick\" x=\"{x:.1}\" y=\"{:.1}\">{}</text>", to + 15.0, escape(name));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_labels_short() {
        let close = |found: Vec<f64>, expected: &[f64]| {
            assert!(
                found.len() == expected.len() && found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12),
                "{found:?}"
            );
        };
        close(ticks(0.0, 1.0, 5.0), &[0.0, 0.2, 0.4, 0.6, 0.8, 1.0]);
        close(ticks(-0.03, 0.11, 6.0), &[0.0, 0.05, 0.1]);
        close(ticks(2.0, 2.0, 5.0), &[2.0]);
        assert_eq!(
            [label(0.5), label(0.0), label(12.0), label(1e-5), label(-0.25)],
            ["0.5", "0", "12", "1.0e-5", "-0.25"]
        );
    }

    #[test]
    fn names_cannot_break_out_of_a_plot() {
        let point = Point { name: "</svg><script>".into(), class: "model", value: 0.5, interval: Some((0.4, 0.6)) };
        let svg = intervals("a & b", &[point], &[(0.5, "\"mark\"")]);
        assert!(!svg.contains("<script") && svg.contains("&lt;/svg&gt;") && svg.contains("a &amp; b"));
        assert_eq!(escape("a\u{202e}\u{7}b\nc"), "a\\u{202e}\\u{7}b\nc");
    }

    #[test]
    fn points_stay_inside() {
        let point = |value| Point { name: "n".into(), class: "model", value, interval: None };
        let numbers = |svg: &str, key: &str| -> Vec<f64> {
            svg.split(&format!(" {key}=\""))
                .skip(1)
                .map(|rest| rest.split('"').next().unwrap().parse().unwrap())
                .collect()
        };
        let svg = intervals("t", &[point(1.0), point(-3.0), point(7.5)], &[]);
        assert!(numbers(&svg, "cx").iter().all(|&x| (LEFT..=WIDTH - RIGHT).contains(&x)));
        let svg = line("t", &[(1.0, 0.0), (2.0, 3.0), (100.0, 1.0)], "x");
        assert!(numbers(&svg, "cx").iter().chain(&numbers(&svg, "cy")).all(|&v| (0.0..=WIDTH).contains(&v)));
        assert!(intervals("t", &[], &[]).ends_with("</svg>"));
    }
}
