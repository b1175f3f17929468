# Draws the panels of the dashboard as SVG, for hack/metrics.sh: where Grafana has them, with their titles, units and legends, but
# without its looks. The input has an item for each panel, with `answers`: what Prometheus said to the query of each target.
# $from, $to: of the time that is shown, in seconds since the epoch; $step: between points.

def width: 1200;
def row: 22;
def gap: 6;
def colours: ["#1a7f37", "#0969da", "#bc4c00", "#8250df", "#bf3989", "#9a6700", "#1b7c83", "#cf222e", "#57606a", "#40a9ff"];
# Of text of 11 pixels.
def text_width: length * 6.4;

def tenths: . * 10 | round / 10;
def escaped: gsub("&"; "&amp;") | gsub("<"; "&lt;") | gsub(">"; "&gt;");
def text($x; $y; $attributes): "<text x=\"\($x | tenths)\" y=\"\($y | tenths)\" \($attributes)>\(tostring | escaped)</text>";

def rounded: if . == floor or . >= 100 then round else . * 100 | round / 100 end | tostring;
def with_unit($unit):
    if $unit != "s" or . == 0 then rounded elif . < 1 then "\(. * 1000 | rounded) ms" else "\(rounded) s" end;

# The next number that can be read off an axis.
def top: . as $most
    | if $most <= 0 then 1 else pow(10; $most | log10 | floor) as $power | first((1, 2, 3, 4, 5, 6, 8, 10) * $power | select(. >= $most)) end;

# Name and points of each series; what is no number is no point.
def series: [
    . as $panel | range(.targets | length) as $i | $panel.answers[$i].data.result[]
    | .metric as $labels
    | {
        name: ($panel.targets[$i].legendFormat | gsub("\\{\\{(?<label>\\w+)\\}\\}"; $labels[.label] // "")),
        points: [.values[] | select(.[1] | test("NaN|Inf") | not) | [.[0], (.[1] | tonumber)]]
    }
    | select(.points | length > 0)
];

# With a colour for each, and its place in lines of at most that width.
def placed($width):
    reduce (to_entries[] | .value + {colour: colours[.key % (colours | length)]}) as $it ({at: 0, line: 0, all: []};
        ($it.name | text_width + 28) as $wide
        | if .at > 0 and .at + $wide > $width then .at = 0 | .line += 1 else . end
        | .all += [$it + {at, line}] | .at += $wide)
    | .all;

# Parts between which points are missing.
def unbroken: reduce .[] as $point ([];
    if length > 0 and $point[0] - .[-1][-1][0] <= 1.5 * $step then .[-1] += [$point] else . + [[$point]] end);

def graph($x; $y; $w; $h): . as $panel
    | ($panel.fieldConfig.defaults.unit) as $unit
    | (series | placed($w - 30)) as $series
    | ([$series[].line] | max // 0) as $lines
    | ($x + 52) as $left | ($x + $w - 14) as $right | ($y + 34) as $upper | ($y + $h - 34 - 15 * $lines - 16) as $lower
    | ([$series[].points[][1]] | max // 0 | top) as $top
    | (0, 0.5, 1 | . as $part | ($lower - ($lower - $upper) * $part) as $at
        | "<path d=\"M\($left) \($at | tenths)H\($right)\" stroke=\"#d8dee4\"/>",
          ($top * $part | with_unit($unit) | text($left - 6; $at + 4; "text-anchor=\"end\" fill=\"#57606a\""))),
      (0, 0.5, 1 | (($right - $left) * . + $left) as $at
        | ($to - $from) * . / 60 | rounded + " min" | text($at; $lower + 15; "text-anchor=\"\(
            if $at == $left then "start" elif $at == $right then "end" else "middle" end)\" fill=\"#57606a\"")),
      (if $series == [] then "none" | text(($left + $right) / 2; ($upper + $lower) / 2; "text-anchor=\"middle\" fill=\"#57606a\"") else empty end),
      ($series[] | . as $it
        | (.points | unbroken[]
            | map("\(($left + ($right - $left) * (.[0] - $from) / ($to - $from)) | tenths),\(($lower - ($lower - $upper) * .[1] / $top) | tenths)")
            # One point alone is a dot, by the caps of its line.
            | if length == 1 then . + . else . end
            | "<polyline stroke=\"\($it.colour)\" points=\"\(join(" "))\"/>"),
          ($lower + 33 + 15 * .line) as $at
        | "<path d=\"M\($x + 14 + .at | tenths) \($at - 4 | tenths)h12\" stroke=\"\(.colour)\" stroke-width=\"3\"/>",
          (.name | text($x + 30 + $it.at; $at; "fill=\"#1f2328\"")));

def panel:
    (.gridPos.x * width / 24) as $x | (.gridPos.y * row) as $y | (.gridPos.w * width / 24 - gap) as $w | (.gridPos.h * row - gap) as $h
    | if .type == "row" then
        .title | text($x + 4; $y + row - 9; "font-size=\"13\" font-weight=\"bold\" fill=\"#1f2328\"")
      else
        "<rect x=\"\($x)\" y=\"\($y)\" width=\"\($w)\" height=\"\($h)\" rx=\"4\" fill=\"#ffffff\" stroke=\"#d0d7de\"/>",
        (.title | text($x + 10; $y + 18; "font-weight=\"bold\" fill=\"#1f2328\"")),
        if .type == "stat" then
            (series | .[0].points[-1][1] // "none" | if type == "number" then round else . end
                | text($x + $w / 2; $y + $h / 2 + 20; "text-anchor=\"middle\" font-size=\"28\" fill=\"#1f2328\""))
        else graph($x; $y; $w; $h) end
      end;

(map(.gridPos.y + .gridPos.h) | max * row) as $height
| "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"-6 -6 \(width + 6) \($height + 6)\" font-family=\"sans-serif\" font-size=\"11\">",
  "<style>polyline{fill:none;stroke-width:1.5;stroke-linecap:round;stroke-linejoin:round}</style>",
  "<rect x=\"-6\" y=\"-6\" width=\"\(width + 6)\" height=\"\($height + 6)\" fill=\"#f6f8fa\"/>",
  (.[] | panel),
  "</svg>"
