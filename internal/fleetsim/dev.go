package fleetsim

import "net/http"

// The development routes.

func (l *life) resetPrefixCache(w http.ResponseWriter, r *http.Request) {
	ok := l.resetAll(r.URL.Query().Get("reset_running_requests") == "true")
	answerJSON(w, map[string]bool{"success": ok})
}

func (l *life) goToSleep(w http.ResponseWriter, r *http.Request) {
	level := int32(1)
	if r.URL.Query().Get("level") == "2" {
		level = 2
	}
	l.sleep.Store(level)
	for _, k := range l.cores {
		k.pause(true)
		k.abortAll()
	}
	l.resetAll(true)
	l.slept(w, map[string]any{"status": "sleeping", "level": level})
}

// slept answers a change of the sleep level. Versions before 0.32 say nothing.
func (l *life) slept(w http.ResponseWriter, state any) {
	if !l.wording().modern() {
		w.WriteHeader(http.StatusOK)
		return
	}
	answerJSON(w, state)
}

func (l *life) wakeUp(w http.ResponseWriter, _ *http.Request) {
	l.sleep.Store(0)
	for _, k := range l.cores {
		k.pause(false)
	}
	l.slept(w, map[string]any{"status": "awake", "tags": nil})
}

func (l *life) isSleeping(w http.ResponseWriter, _ *http.Request) {
	answerJSON(w, map[string]bool{"is_sleeping": l.sleep.Load() > 0})
}

// pause stops scheduling. Requests under way are aborted, finished (mode=wait)
// or frozen until resume (mode=keep). It empties the cache unless told not to.
func (l *life) pause(w http.ResponseWriter, r *http.Request) {
	mode := r.URL.Query().Get("mode")
	l.paused.Store(true)
	for _, k := range l.cores {
		if mode == "wait" {
			k.drain(r.Context())
		}
		k.pause(true)
		if mode != "keep" {
			k.abortAll()
		}
	}
	if r.URL.Query().Get("clear_cache") != "false" {
		l.resetAll(true)
	}
	answerJSON(w, map[string]string{"status": "paused"})
}

func (l *life) resume(w http.ResponseWriter, _ *http.Request) {
	l.paused.Store(false)
	for _, k := range l.cores {
		k.pause(false)
	}
	answerJSON(w, map[string]string{"status": "resumed"})
}

func (l *life) isPaused(w http.ResponseWriter, _ *http.Request) {
	answerJSON(w, map[string]bool{"is_paused": l.paused.Load()})
}

// Our own routes.

func (l *life) getFaults(w http.ResponseWriter, _ *http.Request) {
	answerJSON(w, l.w.Faults())
}

func (l *life) setFaults(w http.ResponseWriter, r *http.Request) {
	var f Faults
	if e := l.wording().body(w, r, &f); e != nil {
		writeError(w, *e)
		return
	}
	l.w.SetFaults(f)
	answerJSON(w, f)
}

func (l *life) wipe(w http.ResponseWriter, _ *http.Request) {
	answerJSON(w, map[string]bool{"success": l.resetAll(true)})
}

// restart answers first: it breaks every connection, this one too.
func (l *life) restart(w http.ResponseWriter, _ *http.Request) {
	w.WriteHeader(http.StatusAccepted)
	l.w.background.Go(func() {
		if err := l.w.restart(); err != nil {
			l.w.cfg.Log.Error("simulated worker did not restart", "worker", l.w.cfg.Name, "error", err)
		}
	})
}

func (l *life) getStats(w http.ResponseWriter, _ *http.Request) {
	type rank struct {
		Engine any `json:"engine"`
		Events any `json:"events,omitempty"`
	}
	out := struct {
		Aborted  uint64 `json:"aborted"`
		InFlight int64  `json:"inFlight"`
		Ranks    []rank `json:"ranks"`
	}{Aborted: l.aborted.Load(), InFlight: l.requests.Load()}
	for i, k := range l.cores {
		s := rank{Engine: k.state()}
		if i < len(l.events) {
			s.Events = l.events[i].snapshot()
		}
		out.Ranks = append(out.Ranks, s)
	}
	answerJSON(w, out)
}
