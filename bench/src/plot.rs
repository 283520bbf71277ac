// SPDX-License-Identifier: Apache-2.0
//! Charts as SVG, readable on light and dark pages. Pure.

use std::fmt::Write as _;

/// One value against a number of objects.
pub(crate) struct Chart {
    pub(crate) title: &'static str,
    /// The number of objects, and the values of all runs with it.
    pub(crate) values: Vec<(u32, Vec<f64>)>,
    /// Values to compare with, drawn as a broken line; may be empty.
    pub(crate) bound: Vec<(u32, f64)>,
}

/// What a horizontal axis shows at equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scale {
    /// Equal differences, from 0 on.
    Linear,
    /// Equal ratios, from a power of ten to another one.
    Logarithmic,
}

/// A horizontal axis.
struct Axis {
    scale: Scale,
    least: f64,
    most: f64,
}

impl Axis {
    fn new(scale: Scale, counts: impl Iterator<Item = u32> + Clone) -> Self {
        let [least, most] =
            [counts.clone().min(), counts.max()].map(|count| f64::from(count.unwrap_or(1).max(1)));
        match scale {
            Scale::Linear => Self { scale, least: 0.0, most },
            Scale::Logarithmic => {
                let power = |value: f64| 10_f64.powf(value);
                let (least, most) = (least.log10().floor(), most.log10().ceil());
                Self { scale, least: power(least), most: power(most.max(least + 1.0)) }
            }
        }
    }

    /// Where a number of objects is.
    fn at(&self, count: f64) -> f64 {
        let part = match self.scale {
            Scale::Linear => count / self.most,
            Scale::Logarithmic => (count / self.least).log10() / (self.most / self.least).log10(),
        };
        part * WIDTH
    }

    /// The numbers that are written under it.
    fn labels(&self) -> Vec<f64> {
        match self.scale {
            Scale::Linear => [0.0, 0.5, 1.0].map(|part| self.most * part).to_vec(),
            Scale::Logarithmic => {
                let next = |count: &f64| Some(count * 10.0).filter(|count| *count < self.most * 2.0);
                std::iter::successors(Some(self.least), next).collect()
            }
        }
    }
}

/// Of one chart, without the space around it.
const WIDTH: f64 = 220.0;
const HEIGHT: f64 = 140.0;
const LEFT: f64 = 44.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 44.0;
/// Distance from one chart to the next.
const STEP: f64 = WIDTH + LEFT + 16.0;

/// From so many values on, a thicker line shows where most are: from the tenth to the ninetieth percentile.
const MANY: usize = 10;

/// As an image on a page, an SVG knows the page's colours only by the reader's preference.
const STYLE: &str = "text{font:11px sans-serif;fill:#24292f}.axis{stroke:#8c959f}.grid{stroke:#8c959f;stroke-opacity:.25}\
    .line{stroke:#0969da;fill:none;stroke-width:2}.bound{stroke:#8c959f;fill:none;stroke-dasharray:4 3}.most{stroke:#0969da;stroke-width:5;stroke-opacity:.35}.range{stroke:#0969da}.point{fill:#0969da}\
    @media(prefers-color-scheme:dark){text{fill:#e6edf3}.line,.range,.most{stroke:#58a6ff}.point{fill:#58a6ff}}";

/// Charts beside each other. `x` is what the horizontal axes count.
pub(crate) fn svg(title: &str, x: &str, scale: Scale, charts: &[Chart]) -> String {
    #[allow(clippy::cast_precision_loss, reason = "a few charts")]
    let width = STEP * charts.len() as f64;
    let height = TOP + HEIGHT + BOTTOM;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" role=\"img\">\n\
         <title>{title} against {x}</title>\n<style>{STYLE}</style>\n"
    );
    let mut left = LEFT;
    for chart in charts {
        let _ = writeln!(text, "<g transform=\"translate({left} {TOP})\">{}</g>", draw(chart, x, scale));
        left += STEP;
    }
    text.push_str("</svg>\n");
    text
}

fn draw(chart: &Chart, x: &str, scale: Scale) -> String {
    let bound = || chart.bound.iter().map(|(_, value)| *value);
    let all = || chart.values.iter().flat_map(|(_, values)| values.iter().copied()).chain(bound());
    let top = round_up(all().fold(0.0, f64::max));
    let axis = Axis::new(scale, chart.values.iter().map(|(count, _)| *count));
    let at_y = |value: f64| HEIGHT - value / top * HEIGHT;
    let mut text = format!("<text y=\"-10\">{}</text>", chart.title);
    for part in [0.0, 0.25, 0.5, 0.75, 1.0] {
        let (y, class) = (at_y(top * part), if part == 0.0 { "axis" } else { "grid" });
        let _ = write!(text, "<line class=\"{class}\" x2=\"{WIDTH}\" y1=\"{y:.1}\" y2=\"{y:.1}\"/>");
        let label = label(top * part);
        let _ = write!(text, "<text x=\"-6\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>", y + 4.0);
    }
    for count in axis.labels() {
        let (x, label) = (axis.at(count), label(count));
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
            axis.at(f64::from(*count)),
            f64::midpoint(sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]),
        );
        let y = at_y(median);
        let (low, high) = (at_y(*least), at_y(*most));
        let _ = write!(
            text,
            "<line class=\"range\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{low:.1}\" y2=\"{high:.1}\"/>"
        );
        if sorted.len() >= MANY {
            let [low, high] = [1, 9].map(|part| at_y(sorted[(sorted.len() - 1) * part / 10]));
            let _ = write!(
                text,
                "<line class=\"most\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{low:.1}\" y2=\"{high:.1}\"/>"
            );
        }
        let _ = write!(text, "<circle class=\"point\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\"/>");
        let _ = write!(line, "{x:.1},{y:.1} ");
    }
    let _ = write!(text, "<polyline class=\"line\" points=\"{}\"/>", line.trim_end());
    if !chart.bound.is_empty() {
        let point =
            |(count, value): &(u32, f64)| format!("{:.1},{:.1}", axis.at(f64::from(*count)), at_y(*value));
        let points: Vec<_> = chart.bound.iter().map(point).collect();
        let _ = write!(text, "<polyline class=\"bound\" points=\"{}\"/>", points.join(" "));
    }
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
        let chart = Chart {
            title: "CPU, s",
            values: vec![(50, vec![1.0, 0.5, 0.75]), (100, vec![1.5])],
            bound: Vec::new(),
        };
        let text = svg("Cost", "nodes", Scale::Linear, &[chart]);
        assert!(text.contains("points=\"110.0,87.5 220.0,35.0\""), "{text}");
        assert!(text.contains("y1=\"105.0\" y2=\"70.0\""), "least and most: {text}");
        assert!(text.contains(">CPU, s<") && text.contains(">nodes<") && text.contains(">1.5<"), "{text}");
    }

    #[test]
    fn bounds_are_broken_lines_and_many_values_have_a_thick_one() {
        let values = vec![(1, (0..=10).map(f64::from).collect())];
        let chart = Chart { title: "periods", values, bound: vec![(0, 2.0), (1, 5.0)] };
        let text = svg("Cost", "threshold", Scale::Linear, &[chart]);
        assert!(text.contains("class=\"bound\" points=\"0.0,112.0 220.0,70.0\""), "{text}");
        assert!(text.contains("class=\"most\" x1=\"220.0\" x2=\"220.0\" y1=\"126.0\" y2=\"14.0\""), "{text}");
    }

    #[test]
    fn logarithmic_axes_have_equal_distances_for_equal_ratios() {
        let chart = Chart {
            title: "CPU, s",
            values: vec![(3, vec![1.0]), (30, vec![1.0]), (300, vec![1.0])],
            bound: Vec::new(),
        };
        let axis = Axis::new(Scale::Logarithmic, chart.values.iter().map(|(count, _)| *count));
        assert_eq!(axis.labels(), [1.0, 10.0, 100.0, 1000.0]);
        let [first, second, third] = [3.0, 30.0, 300.0].map(|count| axis.at(count));
        assert!((second - first - (third - second)).abs() < 1e-9 && first > 0.0);
        assert!(axis.at(1.0).abs() < 1e-9 && (axis.at(1000.0) - WIDTH).abs() < 1e-9);
        assert!(svg("Cost", "endpoints", Scale::Logarithmic, &[chart]).contains(">1000<"));
    }

    #[test]
    fn axes_end_at_round_numbers() {
        assert_eq!([0.11, 0.2, 3.1, 158.0].map(round_up).map(label), ["0.2", "0.2", "5", "200"]);
    }
}
