-- Events and money per minute and kind. A minute is written once, when it is closed: when an event was seen whose time is
-- ten seconds past its end. What comes later than that is in `events` and in `customers`, not here.
--
-- The inner query counts an id once, however often it was delivered; its state is the ids of the open minutes.
CREATE STREAMING TABLE per_minute AS
SELECT span.start AS minute, kind, count(*) AS events, sum(amount) AS amount
FROM (
  SELECT window(time, '1 minute') AS span, kind, id, first(amount) AS amount
  FROM STREAM(events) WATERMARK time DELAY OF INTERVAL 10 SECONDS
  GROUP BY window(time, '1 minute'), kind, id
)
GROUP BY span, kind;
