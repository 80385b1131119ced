package main

import (
	"errors"
	"html/template"
	"log/slog"
	"net/http"
)

// pages are the desk in a browser.
func (d *desk) pages() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", d.showPage)
	mux.HandleFunc("POST /resolve", d.resolvePage)
	return http.NewCrossOriginProtection().Handler(mux) // no other site's page resolves anything
}

type pageData struct {
	Key   string
	Found *record
	Note  string
	Open  []record
}

func (d *desk) showPage(w http.ResponseWriter, r *http.Request) {
	data := pageData{Key: r.URL.Query().Get("key")}
	if data.Key != "" {
		switch found, err := d.find(r.Context(), data.Key); {
		case errors.Is(err, errNoRecord):
			data.Note = err.Error()
		case err != nil:
			fail(w, r, err)
			return
		default:
			data.Found = &found
		}
	}
	var err error
	if data.Open, err = d.open(r.Context()); err != nil {
		fail(w, r, err)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	if err := page.Execute(w, data); err != nil {
		slog.WarnContext(r.Context(), "page", "error", err) // the reader has gone
	}
}

func (d *desk) resolvePage(w http.ResponseWriter, r *http.Request) {
	verdict := r.FormValue("verdict")
	if charge := r.FormValue("charge"); charge != "" {
		verdict = "charged=" + charge
	}
	if err := d.resolve(r.Context(), r.FormValue("id"), verdict); err != nil {
		http.Error(w, err.Error(), http.StatusConflict)
		return
	}
	http.Redirect(w, r, "/", http.StatusSeeOther)
}

func fail(w http.ResponseWriter, r *http.Request, err error) {
	slog.ErrorContext(r.Context(), "page", "error", err)
	http.Error(w, "the database is not available", http.StatusServiceUnavailable)
}

var page = template.Must(template.New("desk").Parse(`<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>Payments: keyed calls</title>
<style>body{font:16px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}table{border-collapse:collapse}td,th{padding:.3rem .6rem;border-bottom:1px solid #ccc;text-align:left}code{font-size:.8rem;word-break:break-all}</style>
<h1>Keyed calls</h1>
<form><label>Key <input name="key" size="45" value="{{.Key}}"></label> <button>Find</button></form>
{{with .Note}}<p>{{.}}</p>{{end}}
{{with .Found}}<p>{{.}}</p>{{end}}
<h2>Open, the oldest first</h2>
{{if not .Open}}<p>Nothing: every call that came has an answer.</p>{{else}}
<table><tr><th>claimed<th>state<th>executions<th>identity<th>it was …</tr>
{{range .Open}}<tr><td>{{.Claimed.Format "2006-01-02 15:04:05"}}<td>{{.State}}{{if .Over}}, lease over{{end}}<td>{{.Epoch}}<td><code>{{.ID}}</code>
<td><form method="post" action="/resolve"><input type="hidden" name="id" value="{{.ID}}">
<button name="verdict" value="free">not done: run it again</button>
<button name="verdict" value="cancelled">not done, and never shall be</button>
<input name="charge" placeholder="charge id"><button name="verdict" value="charged">done: this charge</button></form></tr>{{end}}
</table>{{end}}
</html>
`))
