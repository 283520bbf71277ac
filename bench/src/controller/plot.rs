// SPDX-License-Identifier: Apache-2.0
//! Charts as SVG, readable on light and dark pages. Pure.

use std::fmt::Write as _;

/// One value against a number of objects.
pub(super) struct Chart {
    pub(super) title: &'static str,
    /// The number of objects, and the values of all runs with it.
    pub(super) values: Vec<(u32, Vec<f64>)>,
}

/// Of one chart, without the space around it.
const WIDTH: f64 = 220.0;
const HEIGHT: f64 = 140.0;
const LEFT: f64 = 44.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 44.0;
/// Distance from one chart to the next.
const STEP: f64 = WIDTH + LEFT + 16.0;

/// As an image on a page, an SVG knows the page's colours only by the reader's preference.
const STYLE: &str = "text{font:11px sans-serif;fill:#24292f}.axis{stroke:#8c959f}.grid{stroke:#8c959f;stroke-opacity:.25}\
    .line{stroke:#0969da;fill:none;stroke-width:2}.range{stroke:#0969da}.point{fill:#0969da}\
    @media(prefers-color-scheme:dark){text{fill:#e6edf3}.line,.range{stroke:#58a6ff}.point{fill:#58a6ff}}";

/// Charts beside each other. `x` is what the horizontal axes count.
pub(super) fn svg(x: &str, charts: &[Chart]) -> String {
    #[allow(clippy::cast_precision_loss, reason = "a few charts")]
    let width = STEP * charts.len() as f64;
    let height = TOP + HEIGHT + BOTTOM;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" role=\"img\">\n\
         <title>Cost against {x}</title>\n<style>{STYLE}</style>\n"
    );
    let mut left = LEFT;
    for chart in charts {
        let _ = writeln!(text, "<g transform=\"translate({left} {TOP})\">{}</g>", draw(chart, x));
        left += STEP;
    }
    text.push_str("</svg>\n");
    text
}

fn draw(chart: &Chart, x: &str) -> String {
    let all = || chart.values.iter().flat_map(|(_, values)| values.iter().copied());
    let top = round_up(all().fold(0.0, f64::max));
    let right = f64::from(chart.values.iter().map(|(count, _)| *count).max().unwrap_or(1).max(1));
    let at_x = |count: f64| count / right * WIDTH;
    let at_y = |value: f64| HEIGHT - value / top * HEIGHT;
    let mut text = format!("<text y=\"-10\">{}</text>", chart.title);
    for part in [0.0, 0.25, 0.5, 0.75, 1.0] {
        let (y, class) = (at_y(top * part), if part == 0.0 { "axis" } else { "grid" });
        let _ = write!(text, "<line class=\"{class}\" x2=\"{WIDTH}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>");
        let label = label(top * part);
        let _ = write!(text, "<text x=\"-6\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>", y + 4.0);
    }
    for part in [0.0, 0.5, 1.0] {
        let (x, label) = (at_x(right * part), label(right * part));
        let _ =
            write!(text, "<text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{label}</text>", HEIGHT + 16.0);
    }
    let _ =
        write!(text, "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{x}</text>", WIDTH / 2.0, HEIGHT + 34.0);
    let mut line = String::new();
    for (count, values) in &chart.values {
        let mut sorted = values.clone();
        sorted.sort_by(f64::total_cmp);
        let (Some(least), Some(most)) = (sorted.first(), sorted.last()) else { continue };
        let (x, median) = (
            at_x(f64::from(*count)),
            f64::midpoint(sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]),
        );
        let y = at_y(median);
        let (low, high) = (at_y(*least), at_y(*most));
        let _ = write!(
            text,
            "<line class=\"range\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{low:.1}\" y2=\"{high:.1}\"/>"
        );
        let _ = write!(text, "<circle class=\"point\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\"/>");
        let _ = write!(line, "{x:.1},{y:.1} ");
    }
    let _ = write!(text, "<polyline class=\"line\" points=\"{}\"/>", line.trim_end());
    text
}

/// The next of 1, 2 and 5 times a power of ten.
fn round_up(value: f64) -> f64 {
    let power = 10_f64.powf(value.max(f64::MIN_POSITIVE).log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * power);
    steps.into_iter().find(|step| *step >= value).unwrap_or(10.0 * power)
}

fn label(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_are_medians_on_the_scale_of_the_axes() {
        let chart = Chart { title: "CPU, s", values: vec![(50, vec![1.0, 0.5, 0.75]), (100, vec![1.5])] };
        let text = svg("nodes", &[chart]);
        assert!(text.contains("points=\"110.0,87.5 220.0,35.0\""), "{text}");
        assert!(text.contains("y1=\"105.0\" y2=\"70.0\""), "least and most: {text}");
        assert!(text.contains(">CPU, s<") && text.contains(">nodes<") && text.contains(">1.5<"), "{text}");
    }

    #[test]
    fn axes_end_at_round_numbers() {
        assert_eq!([0.11, 0.2, 3.1, 158.0].map(round_up).map(label), ["0.2", "0.2", "5", "200"]);
    }
}
