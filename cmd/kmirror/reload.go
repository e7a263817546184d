package main

import (
	"context"
	"io/fs"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"go.uber.org/zap"

	"kmirror/config"
)

// settingsPoll is how often the settings file is looked at. A file that is replaced, or a link that is turned, is seen too.
const settingsPoll = 2 * time.Second

// liveSettings are what can change while kmirror runs.
var liveSettings = []string{"topics.include", "topics.exclude"}

// reloader reads the settings again on SIGHUP and when their file changed, and applies the topic lists. Settings that aren't usable change
// nothing.
type reloader struct {
	file  string // "": there is none
	load  func() (config.Config, error)
	apply func(config.Topics) error
	// reopen opens log files anew; SIGHUP asks for it.
	reopen func() error
	log    *zap.Logger

	inForce config.Config
	seen    fs.FileInfo
	told    string // what was last said of changes that need a restart
}

// run watches until ctx ends.
func (r *reloader) run(ctx context.Context) error {
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, syscall.SIGHUP)
	defer signal.Stop(hangup)
	tick := time.NewTicker(settingsPoll)
	defer tick.Stop()
	r.changed()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-hangup:
			if err := r.reopen(); err != nil {
				r.log.Error("log file not opened anew, the old one stays", zap.Error(err))
			}
			r.changed()
			r.reload()
		case <-tick.C:
			if r.changed() {
				r.reload()
			}
		}
	}
}

// changed reports whether the file isn't the one last seen. One that is missing for a moment, as editors do, hasn't changed.
func (r *reloader) changed() bool {
	if r.file == "" {
		return false
	}
	now, err := os.Stat(r.file)
	if err != nil {
		return false
	}
	was := r.seen
	r.seen = now
	return was != nil && (!os.SameFile(was, now) || !was.ModTime().Equal(now.ModTime()) || was.Size() != now.Size())
}

// reload takes what may change from the settings as they are now.
func (r *reloader) reload() {
	settings, err := r.load()
	if err != nil {
		r.log.Error("settings not taken, the old ones stay", zap.Error(err))
		return
	}
	var live, restart []string
	for _, path := range config.Changed(r.inForce, settings) {
		if slices.Contains(liveSettings, path) {
			live = append(live, path)
		} else {
			restart = append(restart, path)
		}
	}
	if text := strings.Join(restart, ", "); text != r.told {
		if r.told = text; text != "" {
			r.log.Warn("settings that need a restart were changed", zap.Strings("settings", restart))
		}
	}
	if len(live) == 0 {
		return
	}
	if err := r.apply(settings.Topics); err != nil {
		r.log.Error("settings not taken, the old ones stay", zap.Error(err))
		return
	}
	r.inForce.Topics.Include, r.inForce.Topics.Exclude = settings.Topics.Include, settings.Topics.Exclude
	r.log.Info("settings taken", zap.Strings("settings", live))
}
