package main

import (
	"bytes"
	"fmt"
	"html/template"
	"image/color"
	"math"
	"slices"
	"strconv"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// plotSpec is one plot of an experiment: either the curves of one name, a line
// for each stack, or a metric over a key of the variant.
type plotSpec struct {
	title   string
	x, y    string
	curve   string
	metric  string
	over    string
	variant string // of the rows whose curves are drawn
	logY    bool
	until   float64 // the last x; 0 is all
}

// lineOf is how a stack is drawn, the same in all plots. The colours stay apart
// for most who see fewer of them (Okabe and Ito), and Belay's are drawn thicker.
var lineOf = map[string]struct {
	color  color.RGBA
	dashes []vg.Length
}{
	stackNone:           {color.RGBA{R: 0x99, G: 0x99, B: 0x99, A: 0xff}, nil},
	stackMiddleware:     {color.RGBA{R: 0xd5, G: 0x5e, B: 0x00, A: 0xff}, nil},
	stackNative:         {color.RGBA{R: 0x00, G: 0x72, B: 0xb2, A: 0xff}, nil},
	stackFailsafe:       {color.RGBA{R: 0xcc, G: 0x79, B: 0xa7, A: 0xff}, nil},
	stackFailsafeHedge:  {color.RGBA{R: 0xcc, G: 0x79, B: 0xa7, A: 0xff}, nil},
	stackRatio:          {color.RGBA{R: 0xe6, G: 0x9f, B: 0x00, A: 0xff}, nil},
	stackNativeOnBelay:  {color.RGBA{R: 0x56, G: 0xb4, B: 0xe9, A: 0xff}, nil},
	stackBelay:          {color.RGBA{R: 0x00, G: 0x9e, B: 0x73, A: 0xff}, nil},
	stackNoBreaker:      {color.RGBA{R: 0x00, G: 0x5c, B: 0x43, A: 0xff}, []vg.Length{vg.Points(5), vg.Points(3)}},
	stackHedge:          {color.RGBA{R: 0x00, G: 0x5c, B: 0x43, A: 0xff}, nil},
	stackLearn:          {color.RGBA{R: 0x00, G: 0x5c, B: 0x43, A: 0xff}, nil},
	stackLearnNoBreaker: {color.RGBA{R: 0x00, G: 0x5c, B: 0x43, A: 0xff}, []vg.Length{vg.Points(5), vg.Points(3)}},
}

const (
	plotWidth  = 15 * vg.Centimeter
	plotHeight = 7.5 * vg.Centimeter
)

// draw returns the plot as SVG, empty if there is nothing to draw.
func (p plotSpec) draw(rows []row) (template.HTML, error) {
	lines := p.lines(rows)
	if len(lines) == 0 {
		return "", nil
	}
	chart := plot.New()
	chart.X.Label.Text, chart.Y.Label.Text = p.x, p.y
	chart.X.Tick.Marker, chart.Y.Tick.Marker = plainTicks{}, plainTicks{}
	chart.Add(plotter.NewGrid())
	if p.logY {
		chart.Y.Scale, chart.Y.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
	} else {
		chart.Y.Min = 0
	}
	for _, l := range lines {
		line, err := plotter.NewLine(l.points)
		if err != nil {
			return "", fmt.Errorf("plot %q, %s: %w", p.title, l.stack, err)
		}
		style := lineOf[l.stack]
		line.Color, line.Dashes, line.Width = style.color, style.dashes, vg.Points(1.2)
		if isBelay(l.stack) {
			line.Width = vg.Points(2.2)
		}
		chart.Add(line)
		chart.Legend.Add(l.stack, line)
	}
	chart.Legend.Top = true
	chart.Legend.XOffs = vg.Points(100) // beside the lines, not on them
	chart.Legend.Padding = vg.Points(2.5)
	for _, style := range []*text.Style{
		&chart.X.Label.TextStyle, &chart.Y.Label.TextStyle, &chart.X.Tick.Label, &chart.Y.Tick.Label, &chart.Legend.TextStyle,
	} {
		style.Font.Variant, style.Font.Size = "Sans", vg.Points(9) // the page's other text has no serifs
	}
	canvas := vgsvg.New(plotWidth, plotHeight)
	area := draw.Crop(draw.New(canvas), 0, -vg.Points(105), 0, 0)
	chart.Draw(area)
	var svg bytes.Buffer
	if _, err := canvas.WriteTo(&svg); err != nil {
		return "", err
	}
	return inline(svg.String()), nil
}

// plainTicks are the library's, without digits that say nothing.
type plainTicks struct{ plot.DefaultTicks }

// Ticks implements [plot.Ticker].
func (t plainTicks) Ticks(least, most float64) []plot.Tick {
	ticks := t.DefaultTicks.Ticks(least, most)
	for i := range ticks {
		if ticks[i].Label != "" {
			ticks[i].Label = strconv.FormatFloat(ticks[i].Value, 'f', -1, 64)
		}
	}
	return ticks
}

// inline makes a standalone SVG part of a page.
func inline(svg string) template.HTML {
	if i := strings.Index(svg, "<svg"); i > 0 {
		svg = svg[i:]
	}
	return template.HTML(svg) //nolint:gosec // made by the plotting library out of our own numbers
}

// drawnLine is the line of one stack.
type drawnLine struct {
	stack  string
	points plotter.XYs
}

func (p plotSpec) lines(rows []row) []drawnLine {
	if p.metric != "" {
		return p.metricLines(rows)
	}
	var lines []drawnLine
	for _, r := range rows {
		if r.Variant != p.variant {
			continue
		}
		for _, c := range r.curves {
			if c.Plot == p.curve {
				lines = p.append(lines, r.Stack, c.X, c.Y)
			}
		}
	}
	return lines
}

// append adds a line of what can be drawn of it: a logarithmic scale has no
// zero.
func (p plotSpec) append(lines []drawnLine, stack string, xs, ys []float64) []drawnLine {
	var points plotter.XYs
	for i, x := range xs {
		y := ys[i]
		if p.until > 0 && x > p.until || p.logY && y <= 0 || math.IsNaN(y) || math.IsInf(y, 0) {
			continue
		}
		points = append(points, plotter.XY{X: x, Y: y})
	}
	if len(points) == 0 {
		return lines
	}
	return append(lines, drawnLine{stack, points})
}

// metricLines are lines through one point for each variant that says nothing
// but the key.
func (p plotSpec) metricLines(rows []row) []drawnLine {
	var stacks []string
	xs, ys := map[string][]float64{}, map[string][]float64{}
	for _, r := range rows {
		key, value, ok := strings.Cut(r.Variant, "=")
		s, has := r.summary(p.metric)
		x, err := strconv.ParseFloat(value, 64)
		if !ok || key != p.over || !has || err != nil {
			continue
		}
		if !slices.Contains(stacks, r.Stack) {
			stacks = append(stacks, r.Stack)
		}
		xs[r.Stack], ys[r.Stack] = append(xs[r.Stack], x), append(ys[r.Stack], s.median)
	}
	var lines []drawnLine
	for _, stack := range stacks {
		lines = p.append(lines, stack, xs[stack], ys[stack])
	}
	return lines
}
